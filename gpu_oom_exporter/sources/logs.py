"""Bytes of logs, with positions: files and globs, docker's and the kubelet's log trees, the kernel's messages.

Each file is followed through rotation by rename and by truncation, deletion and restarts. What is handed out is
`Chunk` after `Chunk` of one file, then `Ended`; who reads decides how far is settled.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpu_oom_exporter.catalog.xids import XID_LINE
from gpu_oom_exporter.model import LogOrigin, LogPosition

CHUNK_BYTES = 1 << 18
HEAD_BYTES = 256
"""A file's first bytes tell whether it is the file it was: inodes are used again, truncated files grow again."""

MOST_BEHIND_BYTES = 64 << 20
"""A log that is further ahead than this cannot be kept up with; what is in between is skipped and its lines counted."""

MOST_FILES = 1024
"""Files that are followed at once; more are counted as not readable."""

REMEMBERED_FILES = 16
"""Rotated files of one path that are remembered as read."""

ROTATED = re.compile(r"[.-]\d[\d.:TZ_-]*$")
"""How a log's name ends after a rotation: .1, -20261201, .2026-12-01T10:00:00; not .err, and not .1.gz."""

POD_LOG = re.compile(r"/(?P<namespace>[^/_]+)_(?P<pod>[^/_]+)_[^/]+/(?P<container>[^/]+)/\d+\.log$")
"""/var/log/pods/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log"""

DOCKER_LOG = re.compile(r"/(?P<id>[0-9a-f]{64})/(?P=id)-json\.log$")
"""/var/lib/docker/containers/ID/ID-json.log"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one file. *skipped_lines* were dropped just before them, because the log was too far ahead."""

    origin: LogOrigin
    file: str
    head: int
    offset: int
    data: bytes
    skipped_lines: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more will come of *file*: it was rotated, truncated or deleted, and is read to its end."""

    origin: LogOrigin
    file: str


@dataclass(slots=True)
class _Open:
    """A file that is followed."""

    path: str
    origin: LogOrigin
    descriptor: int
    file: str
    head: int
    offset: int
    ending: bool = False


def origin_of(path: str, engine: str = "") -> LogOrigin:
    """Whose log *path* is, by the names that docker and the kubelet give."""
    if (pod := POD_LOG.search(path)) is not None:
        stream = f"{pod['namespace']}/{pod['pod']}/{pod['container']}"
        return LogOrigin(f"pod:{stream}:{path}", "pod", "", pod["namespace"], pod["pod"], pod["container"], engine)
    if (docker := DOCKER_LOG.search(path)) is not None:
        return LogOrigin(f"docker:{docker['id']}", "docker", docker["id"], engine=engine)
    return LogOrigin(f"file:{path}", engine=engine)


@dataclass(slots=True)
class LogFiles:
    """Follows the files that *patterns* (glob → engine name or empty) match.

    *marks* are the positions of an earlier run. A file that is there at the first look and has no mark is followed
    from its end: what it holds happened before us.
    """

    patterns: Mapping[str, str]
    marks: Mapping[str, LogPosition] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)
    _read_files: dict[str, deque[str]] = field(default_factory=dict)
    _first: bool = True

    @property
    def files(self) -> int:
        """How many files are followed."""
        return len(self._open)

    def positions(self) -> dict[str, LogPosition]:
        """How far every followed file was read, also those that have said nothing yet."""
        return {o.origin.stream: LogPosition(o.file, o.head, o.offset) for o in self._open.values()}

    def look(self) -> None:
        """Find files that are new since the last look."""
        found: dict[str, str] = {}
        for pattern, engine in self.patterns.items():
            for path in glob.iglob(pattern, recursive=True):
                found.setdefault(path, engine)
        self.unreadable = {path: why for path, why in self.unreadable.items() if path in found}
        for path, engine in sorted(found.items()):
            if path not in self._open:
                self._follow(path, engine)
        self._first = False

    def _follow(self, path: str, engine: str) -> None:
        if len(self._open) >= MOST_FILES:
            self.unreadable[path] = f"more than {MOST_FILES} files"
            return
        origin = origin_of(path, engine)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as err:
            self.unreadable[path] = err.strerror or str(err)
            return
        status = os.fstat(descriptor)
        if not os.path.isfile(path):
            os.close(descriptor)
            return
        self.unreadable.pop(path, None)
        opened = _Open(path, origin, descriptor, f"{status.st_dev}:{status.st_ino}:0", head_of(descriptor), 0)
        mark = self.marks.get(origin.stream)
        if mark is not None:
            opened = self._resume(opened, mark, status)
        elif self._first and origin.kind == "file":
            opened.offset = status.st_size
        self._open[path] = opened

    def _resume(self, opened: _Open, mark: LogPosition, status: os.stat_result) -> _Open:
        """Go on where *mark* is: in this file, or in the one that it was renamed to, which comes first."""
        inode, generation = mark.file.rpartition(":")[::2]
        here = f"{status.st_dev}:{status.st_ino}"
        if inode == here:
            opened.file = mark.file
            if mark.offset <= status.st_size and same_head(opened.descriptor, mark.head):
                opened.offset = mark.offset
            else:
                self._count("truncated")
                opened.file = f"{here}:{int(generation) + 1}"
            return opened
        before = next((other for _, known, other in self._rotated(opened.path) if known == inode), None)
        if before is None:
            if mark.offset:
                self._count("rotated_away")
            return opened
        # the renamed file first; the new one is found at the next look, when this one has ended
        os.close(opened.descriptor)
        descriptor = os.open(before, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return _Open(opened.path, opened.origin, descriptor, mark.file, head_of(descriptor), mark.offset, ending=True)

    @staticmethod
    def _rotated(path: str) -> list[tuple[int, str, str]]:
        """(mtime in ns, device:inode, path) of what *path* was renamed to, oldest first; no compressed ones."""
        found = []
        for other in glob.iglob(f"{glob.escape(path)}[.-]*"):
            if ROTATED.search(other) is None:
                continue
            try:
                status = os.stat(other)
            except OSError:
                continue
            found.append((status.st_mtime_ns, f"{status.st_dev}:{status.st_ino}", other))
        return sorted(found)

    def _count(self, reason: str) -> None:
        self.gaps[reason] = self.gaps.get(reason, 0) + 1

    def read(self, most_chunks: int) -> Iterator[Chunk | Ended]:
        """What is new: at most *most_chunks* chunks of each file, in turn so that none waits for another's storm."""
        for path, opened in tuple(self._open.items()):
            yield from self._read(path, opened, most_chunks)

    def _read(self, path: str, opened: _Open, most_chunks: int) -> Iterator[Chunk | Ended]:
        size = os.fstat(opened.descriptor).st_size
        if size < opened.offset or self._rewritten(opened):
            yield Ended(opened.origin, opened.file)
            self._count("truncated")
            inode, generation = opened.file.rpartition(":")[::2]
            opened.file, opened.offset = f"{inode}:{int(generation) + 1}", 0
            opened.head = head_of(opened.descriptor)
        skipped = 0
        if size - opened.offset > MOST_BEHIND_BYTES:
            skipped = self._skip(opened, size - MOST_BEHIND_BYTES // 2)
        for _ in range(most_chunks):
            data = os.pread(opened.descriptor, CHUNK_BYTES, opened.offset)
            if not data and not skipped:
                break
            if opened.head >> 32 < HEAD_BYTES:
                opened.head = head_of(opened.descriptor)
            yield Chunk(opened.origin, opened.file, opened.head, opened.offset, data, skipped)
            skipped = 0
            opened.offset += len(data)
        else:
            return
        if opened.ending or self._gone(path, opened):
            if not opened.ending:  # one more look: the writer may have written after the rename
                opened.ending = True
                return
            written = os.fstat(opened.descriptor).st_mtime_ns
            os.close(opened.descriptor)
            del self._open[path]
            yield Ended(opened.origin, opened.file)
            self._follow_next(path, opened, written)

    def _follow_next(self, path: str, opened: _Open, written: int) -> None:
        """The file that took the place of one that was rotated, from its start; it may have been rotated itself."""
        self.marks = {stream: mark for stream, mark in self.marks.items() if stream != opened.origin.stream}
        read = self._read_files.setdefault(path, deque(maxlen=REMEMBERED_FILES))
        read.append(opened.file.rpartition(":")[0])
        for mtime, inode, other in self._rotated(path):
            if mtime >= written and inode not in read:
                with contextlib.suppress(OSError):
                    descriptor = os.open(other, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    head = head_of(descriptor)
                    self._open[path] = _Open(path, opened.origin, descriptor, f"{inode}:0", head, 0, ending=True)
                    return
        self._follow(path, opened.origin.engine)

    @staticmethod
    def _rewritten(opened: _Open) -> bool:
        """Whether the head of the file is another: truncated, and grown beyond where we were."""
        return not same_head(opened.descriptor, opened.head)

    @staticmethod
    def _gone(path: str, opened: _Open) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            return True
        return opened.file.rpartition(":")[0] != f"{status.st_dev}:{status.st_ino}"

    @staticmethod
    def _skip(opened: _Open, to: int) -> int:
        """Go on at the first line after *to*; returns how many lines that costs."""
        lines = 0
        while opened.offset < to:
            data = os.pread(opened.descriptor, min(1 << 20, to - opened.offset), opened.offset)
            if not data:
                break
            lines += data.count(b"\n")
            opened.offset += len(data)
        rest = os.pread(opened.descriptor, 1 << 20, opened.offset)
        end = rest.find(b"\n") + 1
        opened.offset += end
        return lines + (end > 0)

    def close(self) -> None:
        """Let go of every file."""
        for opened in self._open.values():
            os.close(opened.descriptor)
        self._open.clear()


def head_of(descriptor: int) -> int:
    """Length and checksum of a file's first bytes, in one number."""
    data = os.pread(descriptor, HEAD_BYTES, 0)
    return len(data) << 32 | zlib.crc32(data)


def same_head(descriptor: int, head: int) -> bool:
    """Whether the file still begins as it did when `head_of` gave *head*; it may have grown since."""
    data = os.pread(descriptor, head >> 32, 0)
    return len(data) << 32 | zlib.crc32(data) == head


KERNEL_STREAM = "kernel"


@dataclass(slots=True)
class KernelMessages:
    """Messages of the kernel's ring from *path*, by facility 0 alone: any user may write others there.

    *after* is the sequence number of the last message that was settled; it counts from each boot. *xids* counts the
    driver's Xids by PCI address and number since this was made.
    """

    path: str = "/dev/kmsg"
    boot_id_path: str = "/proc/sys/kernel/random/boot_id"
    boot: str = ""
    after: int = -1
    gaps: dict[str, int] = field(default_factory=dict)
    xids: dict[tuple[str, int], int] = field(default_factory=dict)
    detail: str = ""
    _descriptor: int = -1

    @property
    def readable(self) -> bool:
        """Whether the kernel's messages are read."""
        return self._descriptor >= 0

    def begin(self, position: LogPosition | None, known: bool) -> None:
        """Open *path* and go on after *position*; without one, and if this host is new to us, only what comes."""
        try:
            with open(self.boot_id_path, encoding="ascii") as file:
                self.boot = file.read().strip()
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if position is not None and position.file == self.boot:
                self.after = position.offset
            elif not known:
                os.lseek(self._descriptor, 0, os.SEEK_END)
        except (OSError, ValueError) as err:
            self.detail = f"{self.path}: {err}"
            self.close()

    def read(self, most: int) -> Iterator[Chunk]:
        """Each new message as a chunk whose offset is its sequence number."""
        origin = LogOrigin(KERNEL_STREAM, "kernel")
        for _ in range(most):
            record = self._next()
            if record is None:
                return
            prefix, _, text = record.partition(b";")
            fields = prefix.split(b",")
            if len(fields) < 3 or not fields[0].isdigit() or not fields[1].isdigit():
                continue
            number = int(fields[1])
            if number <= self.after:
                continue
            self.after = number
            if int(fields[0]) >> 3 != 0:  # written by a program
                continue
            line = b"%s;%s\n" % (prefix, text.split(b"\n", 1)[0])
            if (xid := XID_LINE.search(line)) is not None:
                key = xid[1].decode().lower(), int(xid[2])
                self.xids[key] = self.xids.get(key, 0) + 1
            yield Chunk(origin, self.boot, 0, number, line)

    def _next(self) -> bytes | None:
        if self._descriptor < 0:
            return None
        try:
            return os.read(self._descriptor, 8192) or None
        except BlockingIOError:
            return None
        except BrokenPipeError:  # the ring went round before we read it
            self.gaps["overwritten"] = self.gaps.get("overwritten", 0) + 1
            return b""
        except OSError as err:
            self.detail = f"{self.path}: {err.strerror}"
            self.close()
            return None

    def close(self) -> None:
        """Let go of the device."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def patterns_of(docker_root: str, pods_root: str, files: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The globs of docker's and the kubelet's trees, and of *files* (glob, engine)."""
    found = dict(files)
    if docker_root:
        found[f"{glob.escape(docker_root)}/*/*-json.log"] = ""
    if pods_root:
        found[f"{glob.escape(pods_root)}/*/*/*.log"] = ""
    return found
