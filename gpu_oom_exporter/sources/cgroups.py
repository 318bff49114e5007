"""How much of its memory limits a cgroup has left: v2's `memory.max`, v1's `memory.limit_in_bytes`, of every ancestor.

The limits bind together, so the tightest counts. The page cache that the kernel would drop first (`inactive_file`) is
free, as it is in the host's MemAvailable.
"""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED_BYTES = 1 << 62
"""v1 writes a number near 2**63 for no limit."""


@dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    used: str
    cache: str


V2 = _Version("memory.max", "memory.current", "inactive_file")
V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def room_ratio(cgroupfs: str, folder: str) -> float | None:
    """Smallest share of a limit that is left, 0 to 1, for *folder* below *cgroupfs* and all above it; 1 without any.

    ``None`` where the folder is not in our view: a container that has a cgroup namespace of its own sees no other.
    """
    version = V1 if folder.split("/", 1)[0] == "memory" else V2
    parts = [part for part in folder.split("/") if part]
    if not folder or ".." in parts:
        return None
    least = 1.0
    for depth in range(len(parts), -1, -1):
        here = "/".join((cgroupfs, *parts[:depth]))
        limit = _text(f"{here}/{version.limit}")
        if limit is None:
            if depth == len(parts) and _text(f"{here}/cgroup.procs") is None:
                return None
            continue  # the host's own root has none, a container's may
        if limit.isdecimal() and 0 < int(limit) < UNLIMITED_BYTES:
            used = _text(f"{here}/{version.used}")
            if used is None or not used.isdecimal():
                return None
            free = int(limit) - int(used) + _cache(f"{here}/memory.stat", version.cache)
            least = min(least, max(0.0, free / int(limit)))
    return least


def _cache(path: str, name: str) -> int:
    """The figure *name* of a `memory.stat`; 0 when it is not there."""
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(16384).strip()
    except OSError:
        return None
