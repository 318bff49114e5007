"""Names that a workload chose, made safe to be label values."""

from __future__ import annotations

LABEL_LENGTH = 64
"""A name of a workload is cut here (`design.md` §4): enough to recognise it, too little to flood Prometheus."""


def label(text: str) -> str:
    """*text* without control characters and ``<>|``, cut at 64 characters."""
    if text.isprintable() and not any(c in text for c in "<>|") and len(text) <= LABEL_LENGTH:
        return text
    return "".join(c for c in text if c.isprintable() and c not in "<>|")[:LABEL_LENGTH]
