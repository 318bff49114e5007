"""Entries of systemd's journal, through libsystemd as cysystemd brings it along (the extra `journal`).

Fields that begin with an underscore come from journald itself; all others can be set by whoever writes an entry.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_oom_exporter.model import LogPosition

JOURNAL_STREAM = "journal"

FIELDS = ("MESSAGE", "_PID", "SYSLOG_IDENTIFIER", "_COMM", "_TRANSPORT", "CONTAINER_NAME")
"""What the classifier reads of an entry."""

HOST_PROGRAMS = frozenset({"systemd", "dockerd", "containerd", "kubelet", "systemd-oomd", "earlyoom", "crio"})
"""Programs that report about the host, if root runs them."""

CURSOR = re.compile(r"s=(?P<file>[0-9a-f]+);i=(?P<number>[0-9a-f]+);")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, the *order*-th: *file* and *number* name it for good, *cursor* is where reading goes on after it.

    *whose* is the container or systemd unit that wrote it; *kernel* and *host* say who speaks for the machine.
    """

    order: int
    file: str
    number: int
    cursor: str
    line: bytes
    whose: str
    kernel: bool
    host: bool


@dataclass(slots=True)
class Journal:
    """Reads the journal below *roots*, the first that is there; *cursor* is the entry before the next."""

    roots: tuple[str, ...] = ("/var/log/journal", "/run/log/journal")
    detail: str = ""
    cursor: str = ""
    _reader: Any = field(default=None)
    _ahead: Any = None
    _count: int = 0
    _came_after_us: bool = False

    @property
    def readable(self) -> bool:
        """Whether the journal is read."""
        return self._reader is not None

    def begin(self, position: LogPosition | None, known: bool) -> None:
        """Go on after *position*; without one with what comes, or at the start of a journal that came after us.

        *known* makes no difference: a host that we know may have had its journal, or the extra, only since.
        """
        self.cursor = position.file if position is not None else ""
        root = next((root for root in self.roots if os.path.isdir(root)), None)
        self._came_after_us = self._came_after_us or root is None
        if root is None:
            self.detail = f"there is no {' and no '.join(self.roots)}"
            return
        try:
            from cysystemd.reader import JournalReader
        except ImportError:
            self.detail = "the journal needs the extra: pip install 'gpu-oom-exporter[journal]'"
            return
        try:
            reader = JournalReader()
            reader.open_directory(root)
            _ = reader.fd  # once it was asked for, libsystemd looks for the files that come by rotation
            if position is not None:
                reader.seek_cursor(position.file.encode())
                self._ahead = reader.next()
                if self._ahead and self._ahead.cursor.decode() == position.file:
                    self._ahead = None  # else it is gone, and this the first after it
            elif not self._came_after_us:
                reader.seek_tail()
                if not reader.previous():  # it gives the last but one, so there is at most one
                    reader.seek_head()
                while entry := reader.next():
                    self.cursor = entry.cursor.decode()
        except Exception as err:  # noqa: BLE001 - cysystemd raises its own and the C library's
            self.detail = f"{root}: {err}"
            return
        self._reader = reader
        self.detail = ""

    def again(self) -> None:
        """Go on where reading stopped: a journal can fail while it is rotated, or appear after us."""
        self.begin(LogPosition(self.cursor, 0, 0) if self.cursor else None, known=True)

    def read(self, most: int) -> Iterator[Entry]:
        """Up to *most* entries that are new."""
        if self._reader is None:
            return
        try:
            self._reader.process_events()
            for _ in range(most):
                found, self._ahead = self._ahead or self._reader.next(), None
                if not found:
                    return
                self._count += 1
                self.cursor = found.cursor.decode()
                entry = entry_of(self._count, self.cursor, dict(found.data), found.get_realtime_usec())
                if entry is not None:
                    yield entry
        except Exception as err:  # noqa: BLE001 - cysystemd raises its own and the C library's
            self.detail = f"{self.roots[0]}: {err}"
            self._reader = self._ahead = None

    def close(self) -> None:
        """Let go of the journal."""
        self._reader = None


def entry_of(order: int, cursor: str, data: dict[str, str], usec: int) -> Entry | None:
    """The *order*-th entry, with the fields *data*; ``None`` without a message."""
    place = CURSOR.match(cursor)
    if place is None or "MESSAGE" not in data:
        return None
    record = {name: data[name] for name in FIELDS if name in data}
    record["__REALTIME_TIMESTAMP"] = str(usec)
    container = data.get("CONTAINER_ID_FULL", "")  # its runtime writes for it, and is root
    program = "" if container else data.get("_COMM", data.get("SYSLOG_IDENTIFIER", ""))
    return Entry(
        order,
        place["file"],
        int(place["number"], 16),
        cursor,
        json.dumps(record).encode() + b"\n",
        container or data.get("_SYSTEMD_UNIT", ""),
        data.get("_TRANSPORT") == "kernel",
        data.get("_UID") == "0" and program in HOST_PROGRAMS,
    )
