"""GPU memory for people who serve LLMs: how much is left, who holds it, when it ends, what to do."""

__version__ = "0.1.0"
