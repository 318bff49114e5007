"""Watches the logs: bytes from `sources/logs.py` through the classifier into the archive, on a thread of its own.

A storm costs this thread's time and never the tick's; what cannot be kept up with is dropped and counted.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpu_oom_exporter.analysis.incidents import Classifier
from gpu_oom_exporter.catalog.categories import SAID_BY_HOST, SAID_BY_KERNEL
from gpu_oom_exporter.model import Incident, LogFacts, LogOrigin, LogPosition, Reason, Recorded
from gpu_oom_exporter.publish.archive import Archive, ArchiveError
from gpu_oom_exporter.sources.board import Clock, SourceError
from gpu_oom_exporter.sources.logs import Chunk, KernelMessages, LogFiles

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often new files are looked for."""

IDLE_SECONDS = 0.25
"""How long the thread sleeps when nothing was new."""

COMMIT_SECONDS = 1.0
"""Positions are written at most this often, incidents at once."""

RECENT_SECONDS = 1800.0
CHUNKS_PER_ROUND = 8
KERNEL_RECORDS_PER_ROUND = 1000
KEPT_PLACES = 4096


@dataclass(slots=True)
class _Stream:
    """One file that is being read: *base* is where the classifier's offset 0 is in it."""

    origin: LogOrigin
    file: str
    head: int
    base: int
    classifier: Classifier = field(default_factory=lambda: Classifier(sessions=False))

    @property
    def position(self) -> LogPosition:
        """Where to go on after a restart."""
        return LogPosition(self.file, self.head, self.base + self.classifier.low_water)


@dataclass(slots=True)
class _Kernel:
    """The kernel's stream; its offsets are sequence numbers, which *places* gives for the classifier's offsets."""

    classifier: Classifier = field(default_factory=lambda: Classifier(sessions=False))
    places: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_PLACES))
    length: int = 0

    def number(self, offset: int) -> int:
        """The sequence number of the message at the classifier's *offset*."""
        index = bisect.bisect_right([place[0] for place in self.places], offset) - 1
        return self.places[max(0, index)][1]


class Watch:
    """Reads *files* and *kernel*, and keeps what they tell in *archive*."""

    def __init__(self, files: LogFiles, kernel: KernelMessages | None, archive: Archive, clock: Clock) -> None:
        self.files = files
        self.kernel = kernel
        self.archive = archive
        self.clock = clock
        self.facts: LogFacts | None = None
        self.problem = ""
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._told_by_kernel = _Kernel()
        self._ended: dict[str, LogPosition] = {}
        self._recent: deque[Recorded] = deque()
        self._totals: dict[str, tuple[int, float]] = {}
        self._dropped_lines = 0
        self._looked = self._committed = float("-inf")
        self._pending: list[Recorded] = []
        self._refused: set[str] = set()
        self._began = False

    def run(self, stop: threading.Event) -> None:
        """Watch until *stop*; what fails is tried again, and said once."""
        while not stop.is_set():
            try:
                busy = self.round()
                if self.problem:
                    log.info("log archive recovered")
                    self.problem = ""
            except ArchiveError as err:
                busy = False
                if not self.problem:
                    log.warning("log archive failed", extra={"detail": str(err)})
                self.problem = str(err)
            stop.wait(0.0 if busy else IDLE_SECONDS)
        try:
            self._commit(self.clock.mono(), force=True)
        except ArchiveError as err:
            log.warning("log archive failed", extra={"detail": str(err)})
        self.close()

    def close(self) -> None:
        """Let go of every file."""
        self.files.close()
        if self.kernel is not None:
            self.kernel.close()
        self.archive.close()

    def _begin(self) -> None:
        positions = self.archive.positions()
        self._totals = self.archive.totals()
        self._recent.extend(self.archive.since(self.clock.time() - RECENT_SECONDS))
        self.files.marks = positions
        if self.kernel is not None:
            self.kernel.begin(positions.get("kernel"), known=bool(positions))
        self._began = True

    def round(self) -> bool:
        """One look at everything; returns whether there was something new."""
        if not self._began:
            self._begin()
        now = self.clock.mono()
        if now - self._looked >= LOOK_SECONDS:
            self.files.look()
            self._say_refusals()
            self._looked = now
        busy = False
        for event in self.files.read(CHUNKS_PER_ROUND):
            if isinstance(event, Chunk):
                busy = True
                self._take(event)
            else:
                self._end(event.origin, event.file)
        if self.kernel is not None:
            for chunk in self.kernel.read(KERNEL_RECORDS_PER_ROUND):
                busy = True
                self._take_kernel(chunk)
        self._settle(now)
        self._commit(now)
        return busy

    def _say_refusals(self) -> None:
        for path, why in self.files.unreadable.items():
            if path not in self._refused:
                log.warning("log not readable", extra={"path": path, "detail": why})
        self._refused = set(self.files.unreadable)

    def _take(self, chunk: Chunk) -> None:
        key = chunk.origin.stream, chunk.file
        stream = self._streams.get(key)
        if stream is not None and chunk.skipped_lines:
            self._record(stream, stream.classifier.close())
            stream = None
        if stream is None:
            stream = self._streams[key] = _Stream(chunk.origin, chunk.file, chunk.head, chunk.offset)
        self._dropped_lines += chunk.skipped_lines
        stream.head = chunk.head
        self._record(stream, stream.classifier.feed(chunk.data))

    def _end(self, origin: LogOrigin, file: str) -> None:
        stream = self._streams.pop((origin.stream, file), None)
        if stream is None:
            return
        self._record(stream, stream.classifier.close())
        self._ended[origin.stream] = stream.position

    def _record(self, stream: _Stream, found: Iterable[Incident]) -> None:
        for incident in found:
            if stream.origin.kind in ("docker", "pod") and incident.category in SAID_BY_HOST:
                continue  # a container speaks for itself, not for the host
            moved = replace(incident, offset=stream.base + incident.offset)
            self._pending.append(Recorded(moved, stream.origin, stream.file, self.clock.time()))

    def _take_kernel(self, chunk: Chunk) -> None:
        kernel = self._told_by_kernel
        kernel.places.append((kernel.length, chunk.offset))
        kernel.length += len(chunk.data)
        self._record_kernel(kernel.classifier.feed(chunk.data))

    def _record_kernel(self, found: Iterable[Incident]) -> None:
        assert self.kernel is not None
        for incident in found:
            if incident.category in SAID_BY_KERNEL:
                moved = replace(incident, offset=self._told_by_kernel.number(incident.offset))
                origin = LogOrigin("kernel", "kernel")
                self._pending.append(Recorded(moved, origin, self.kernel.boot, self.clock.time()))

    def _settle(self, now: float) -> None:
        for stream in self._streams.values():
            self._record(stream, stream.classifier.settle(now))
        if self.kernel is not None:
            self._record_kernel(self._told_by_kernel.classifier.settle(now))

    def _positions(self) -> dict[str, LogPosition]:
        positions = {**self._ended, **self.files.positions()}
        positions.update({stream.origin.stream: stream.position for stream in self._streams.values()})
        if self.kernel is not None and self.kernel.boot and self.kernel.readable:
            told = self._told_by_kernel
            low = told.classifier.low_water
            settled = self.kernel.after if low >= told.length else told.number(low) - 1
            positions["kernel"] = LogPosition(self.kernel.boot, 0, settled)
        return positions

    def _commit(self, now: float, force: bool = False) -> None:
        if not self._pending and not force and now - self._committed < COMMIT_SECONDS:
            return
        new = self.archive.commit(self._pending, self._positions(), self.clock.time())
        self._pending.clear()
        self._ended.clear()
        self._committed = now
        for recorded in new:
            count, last = self._totals.get(recorded.incident.category, (0, 0.0))
            self._totals[recorded.incident.category] = count + 1, max(last, recorded.time)
            self._recent.append(recorded)
            log.warning(
                "incident",
                extra={
                    "category": recorded.incident.category,
                    "severity": recorded.incident.severity,
                    "stream": recorded.origin.stream,
                    "line": recorded.incident.line,
                },
            )
        while self._recent and self._recent[0].time < self.clock.time() - RECENT_SECONDS:
            self._recent.popleft()
        gaps = dict(self.files.gaps)
        for reason, count in (self.kernel.gaps if self.kernel is not None else {}).items():
            gaps[reason] = gaps.get(reason, 0) + count
        self.facts = LogFacts(
            {category: count for category, (count, _) in self._totals.items()},
            {category: last for category, (_, last) in self._totals.items()},
            tuple(self._recent),
            self.files.files,
            len(self.files.unreadable),
            self._dropped_lines,
            gaps,
            self.kernel is not None and self.kernel.readable,
        )


class WatchSource:
    """What the watch has told, for the board; it is as healthy as the archive."""

    name = "logs"
    key = ""
    timeout_seconds = 2.0
    stale_seconds = 30.0
    period_seconds = 0.5

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    async def read(self) -> LogFacts:
        """The newest facts; the first read starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.watch.run, args=(self._stop,), name="logs", daemon=True)
            self._thread.start()
        if self.watch.problem:
            raise SourceError(Reason.READER_FAILED, self.watch.problem)
        return self.watch.facts or LogFacts()

    async def close(self) -> None:
        """End the thread; it commits what it has."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.5)
