"""Watches the logs: bytes from `sources/logs.py` through the classifier into the archive, on a thread of its own.

A storm costs this thread's time and never the tick's; what cannot be kept up with is dropped and counted.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpu_oom_exporter.analysis.incidents import Classifier
from gpu_oom_exporter.catalog.categories import SAID_BY_HOST, SAID_BY_KERNEL
from gpu_oom_exporter.model import Incident, LogFacts, LogOrigin, LogPosition, Reason, Recorded
from gpu_oom_exporter.publish.archive import Archive, ArchiveError
from gpu_oom_exporter.sources.board import Clock, SourceError
from gpu_oom_exporter.sources.journal import JOURNAL_STREAM, Entry, Journal
from gpu_oom_exporter.sources.logs import KERNEL_STREAM, Chunk, KernelMessages, LogFiles

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often new files are looked for."""

AGAIN_SECONDS = 30.0
"""How often a journal that cannot be read is tried."""

IDLE_SECONDS = 0.25
"""How long the thread sleeps when nothing was new."""

COMMIT_SECONDS = 1.0
"""Positions are written at most this often, incidents at once."""

RECENT_SECONDS = 1800.0
MOST_RECENT = 1000
CHUNKS_PER_ROUND = 8
ENTRIES_PER_ROUND = 1000
KEPT_PLACES = 4096
MOST_VOICES = 64


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
class _Entries:
    """A stream of numbered entries: *places* gives the entry that stands at an offset of the classifier."""

    classifier: Classifier = field(default_factory=lambda: Classifier(sessions=False))
    places: deque[tuple[int, Entry]] = field(default_factory=lambda: deque(maxlen=KEPT_PLACES))
    length: int = 0

    def take(self, entry: Entry) -> list[Incident]:
        """The incidents that are over with *entry*."""
        self.places.append((self.length, entry))
        self.length += len(entry.line)
        return self.classifier.feed(entry.line)

    def at(self, offset: int) -> Entry:
        """The entry at the classifier's *offset*, or the oldest that is remembered."""
        index = bisect.bisect_right(self.places, offset, key=lambda place: place[0]) - 1
        return self.places[max(0, index)][1]

    def oldest_open(self) -> Entry | None:
        """The first entry of the oldest open incident; ``None`` when all is settled."""
        low = self.classifier.low_water
        return self.at(low) if low < self.length else None


@dataclass(slots=True)
class _Voices:
    """The journal, apart by who speaks: what one writes must not merge with, or hide, what another does."""

    entries: OrderedDict[str, _Entries] = field(default_factory=OrderedDict)
    read: deque[Entry] = field(default_factory=lambda: deque(maxlen=KEPT_PLACES))

    def voice_of(self, entry: Entry) -> _Entries:
        """The stream that *entry* belongs to, new if it has not spoken lately."""
        self.read.append(entry)
        name = "kernel" if entry.kernel else "host" if entry.host else f"of {entry.whose}"
        found = self.entries.setdefault(name, _Entries())
        self.entries.move_to_end(name)
        return found

    def silence(self) -> _Entries | None:
        """The one that has been quiet longest, taken away when there are too many."""
        return self.entries.popitem(last=False)[1] if len(self.entries) > MOST_VOICES else None

    def settled(self) -> Entry | None:
        """The last entry before the oldest open incident; ``None`` if that is before the first that was read."""
        oldest = min((entry.order for voice in self.entries.values() if (entry := voice.oldest_open())), default=None)
        return next((entry for entry in reversed(self.read) if oldest is None or entry.order < oldest), None)


class Watch:
    """Reads *files*, *kernel* and *journal*, and keeps what they tell in *archive*."""

    def __init__(
        self,
        files: LogFiles,
        kernel: KernelMessages | None,
        archive: Archive,
        clock: Clock,
        journal: Journal | None = None,
    ) -> None:
        self.files = files
        self.kernel = kernel
        self.journal = journal
        self.archive = archive
        self.clock = clock
        self.facts: LogFacts | None = None
        self.problem = ""
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._by_kernel, self._voices = _Entries(), _Voices()
        self._ended: dict[str, LogPosition] = {}
        self._recent: deque[Recorded] = deque(maxlen=MOST_RECENT)
        self._totals: dict[str, tuple[int, float]] = {}
        self._dropped_lines = 0
        self._looked = self._committed = self._tried = float("-inf")
        self._journal_began = self._said = ""
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
        for source in (self.kernel, self.journal):
            if source is not None:
                source.close()
        self.archive.close()

    def _begin(self) -> None:
        positions = self.archive.positions()
        self._totals = self.archive.totals()
        self._recent.extend(self.archive.since(self.clock.time() - RECENT_SECONDS))
        self.files.marks = positions
        for source, stream in ((self.kernel, KERNEL_STREAM), (self.journal, JOURNAL_STREAM)):
            if source is not None:
                source.begin(positions.get(stream), known=bool(positions))
                if not source.readable:
                    log.info("log not watched", extra={"stream": stream, "detail": source.detail})
                    self._said = source.detail
        self._journal_began = self.journal.cursor if self.journal is not None else ""
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
        if self.journal is not None and not self.journal.readable and now - self._tried >= AGAIN_SECONDS:
            self._tried = now
            if self.journal.detail != self._said:
                log.warning("log not watched", extra={"stream": JOURNAL_STREAM, "detail": self.journal.detail})
            self.journal.again()
            self._said = self.journal.detail
            if self.journal.readable:
                log.info("log watched", extra={"stream": JOURNAL_STREAM})
        busy = False
        for event in self.files.read(CHUNKS_PER_ROUND):
            if isinstance(event, Chunk):
                busy = True
                self._take(event)
            else:
                self._end(event.origin, event.file)
        if self.kernel is not None:
            for chunk in self.kernel.read(ENTRIES_PER_ROUND):
                busy = True
                entry = Entry(chunk.offset, chunk.file, chunk.offset, "", chunk.data, "", True, False)
                self._record_entries(self._by_kernel, KERNEL_STREAM, self._by_kernel.take(entry))
        if self.journal is not None:
            for entry in self.journal.read(ENTRIES_PER_ROUND):
                busy = True
                voice = self._voices.voice_of(entry)
                if not (entry.kernel and self.kernel is not None and self.kernel.readable):  # else told twice
                    self._record_entries(voice, JOURNAL_STREAM, voice.take(entry))
                if (silent := self._voices.silence()) is not None:
                    self._record_entries(silent, JOURNAL_STREAM, silent.classifier.close())
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

    def _record_entries(self, entries: _Entries, stream: str, found: Iterable[Incident]) -> None:
        for incident in found:
            entry = entries.at(incident.offset)
            # the kernel tells of the kernel alone, and nobody but it and the host's own programs tells of the host
            believed = incident.category in SAID_BY_KERNEL if entry.kernel else incident.category not in SAID_BY_HOST
            if believed or (entry.host and incident.category in SAID_BY_HOST):
                machine = entry.kernel or entry.host
                origin = LogOrigin(stream, "kernel" if machine else "journal", "" if machine else entry.whose)
                moved = replace(incident, offset=entry.number)
                self._pending.append(Recorded(moved, origin, entry.file, self.clock.time()))

    def _settle(self, now: float) -> None:
        for stream in self._streams.values():
            self._record(stream, stream.classifier.settle(now))
        self._record_entries(self._by_kernel, KERNEL_STREAM, self._by_kernel.classifier.settle(now))
        for voice in self._voices.entries.values():
            self._record_entries(voice, JOURNAL_STREAM, voice.classifier.settle(now))

    def _positions(self) -> dict[str, LogPosition]:
        positions = {**self._ended, **self.files.positions()}
        positions.update({stream.origin.stream: stream.position for stream in self._streams.values()})
        if self.kernel is not None and self.kernel.readable:
            oldest = self._by_kernel.oldest_open()
            number = self.kernel.after if oldest is None else oldest.number - 1
            positions[KERNEL_STREAM] = LogPosition(self.kernel.boot, 0, number)
        if self.journal is not None and self.journal.readable:
            last = self._voices.settled()
            cursor = last.cursor if last is not None else self._journal_began
            if cursor:
                positions[JOURNAL_STREAM] = LogPosition(cursor, 0, 0)
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
            dict(self.kernel.xids) if self.kernel is not None else {},
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
