"""Which processes have an NVIDIA device file open, whether or not NVML lists them.

A repeated scan skips processes whose identity and count of descriptors are unchanged; one stat tells both, for
the kernel never gives the inode of one process's /proc folder to another. A descriptor that was swapped for
another keeps the count, so every process is looked at anew within `FULL_SECONDS`, a few per scan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DEVICES = ("/dev/nvidia", "/dev/nvidia-uvm", "/dev/nvidia-caps")
FULL_SECONDS = 60.0


@dataclass(slots=True)
class _Seen:
    inode: int
    count: int
    looked: float
    files: frozenset[str]


class Openers:
    """Scans the descriptors of every process under *root* for files below *devices*."""

    def __init__(self, root: str = "/proc", devices: tuple[str, ...] = DEVICES) -> None:
        self.root = root
        self.devices = devices
        self._seen: dict[str, _Seen] = {}

    def scan(self, mono: float) -> Mapping[int, frozenset[str]]:
        """PID → NVIDIA device files it has open, for the processes that have any."""
        try:
            pids = [name for name in os.listdir(self.root) if name.isdecimal()]
        except OSError:
            return {}
        seen: dict[str, _Seen] = {}
        for pid in pids:
            known = self._look(pid, mono)
            if known is not None:
                seen[pid] = known
        self._seen = seen
        return {int(pid): known.files for pid, known in seen.items() if known.files}

    def _look(self, pid: str, mono: float) -> _Seen | None:
        before = self._seen.get(pid)
        folder = f"{self.root}/{pid}/fd"
        try:
            status = os.stat(folder)
            # the size is the count of descriptors since Linux 6.2, and 0 before
            count = status.st_size or len(os.listdir(folder))
        except OSError:
            return None
        # spread by PID, so that the full looks do not fall into one scan
        age = FULL_SECONDS * (0.5 + (int(pid) % 64) / 128)
        if before is not None and (before.inode, before.count) == (status.st_ino, count) and mono - before.looked < age:
            return before
        return _Seen(status.st_ino, count, mono, self._files(folder))

    def _files(self, folder: str) -> frozenset[str]:
        found = set()
        try:
            names = os.listdir(folder)
        except OSError:
            return frozenset()
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith(self.devices):
                found.add(target)
        return frozenset(found)
