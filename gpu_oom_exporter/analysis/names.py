"""Names that a workload chose, made safe to be label values."""

from __future__ import annotations

from functools import lru_cache

LABEL_LENGTH = 64
"""A name of a workload is cut here (`design.md` §4): enough to recognise it, too little to flood Prometheus."""


@lru_cache(4096)  # the same few hundred names come by every second
def label(text: str) -> str:
    """*text* without control characters and ``<>|``, cut at 64 characters."""
    return "".join(c for c in text if c.isprintable() and c not in "<>|")[:LABEL_LENGTH]
