"""TELL: the only code that writes to the world."""
