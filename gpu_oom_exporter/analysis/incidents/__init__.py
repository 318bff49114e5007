"""What does this log say happened? Chunks of bytes in, incidents out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import re2

from gpu_oom_exporter.analysis.incidents import lines
from gpu_oom_exporter.analysis.incidents.episodes import WINDOW_LINES, Sighting
from gpu_oom_exporter.analysis.incidents.folding import Folder, identity
from gpu_oom_exporter.analysis.incidents.lines import Format, Line, Speaker
from gpu_oom_exporter.analysis.incidents.pieces import Pieces
from gpu_oom_exporter.analysis.incidents.reading import ALARMS, Claim, claims
from gpu_oom_exporter.analysis.incidents.scanning import Hit, Scanner
from gpu_oom_exporter.analysis.incidents.tracebacks import Above, look_above
from gpu_oom_exporter.analysis.incidents.transcripts import Transcript, opens
from gpu_oom_exporter.analysis.incidents.voice import quotes_on
from gpu_oom_exporter.catalog import voice as voice_words
from gpu_oom_exporter.catalog.signatures import Role
from gpu_oom_exporter.model import Incident

__all__ = ["Classifier", "Format"]

MOST_PROCESSES = 512
"""Processes whose phase is remembered; older ones are forgotten."""

MOST_QUOTED_LINES, MOST_QUOTED_BYTES = 60, 8192
"""How many lines, and bytes, below a request logger's line are looked at as its quoted text."""

REQUEST_LOGGER = re2.compile(rb"(?i)" + voice_words.REQUEST_LOGGER.encode())
"""Searched in what stands above before any line of it is taken apart."""

MOST_LINES_ABOVE = 300
"""How many lines above an exception are looked at for its traceback."""

MOST_BYTES_ABOVE = 32768
"""How much of each of them is read; docker's pieces are of up to 16 KiB."""

STAMP_LINES, STAMP_BYTES = 20, 400
"""How far up a line without a time borrows one, and how much of each line is looked at for it."""

STAMP = re.compile(rb"\d\d:\d\d:\d\d|\[ *\d+\.\d|_TIMESTAMP")

EXCEPTION = re.compile(rb"(?:Error|Exception|OutOfResources)\b|out of memory")
"""Lines that may have a traceback above them."""


class Classifier:
    """Reads one stream. Chunk boundaries do not matter; state is bounded in lines, time and bytes.

    *sessions* is whether pasted terminal sessions are judged; a log that is followed has none.
    """

    def __init__(self, chosen: Format = Format.AUTO, sessions: bool = True) -> None:
        self.chosen = chosen
        self.sessions = sessions
        self.scanner = Scanner(chosen)
        self.folder = Folder()
        self.transcript: Transcript | None = None
        self._phases: dict[tuple[str, int | str | None], tuple[str, int]] = {}
        self._pieces = Pieces(chosen)

    @property
    def low_water(self) -> int:
        """Offset from which the stream must be read again after a restart, so that no open incident is lost.

        The traceback above its first line may begin up to `PAST_BYTES` earlier.
        """
        open_lines = (self.folder.low_water, self._pieces.low_water, self.scanner.offset)
        return min(offset for offset in open_lines if offset is not None)

    def feed(self, data: bytes) -> list[Incident]:
        """The incidents that are over by the end of *data*."""
        told: list[Incident] = []
        for hit in self.scanner.feed(data):
            told += self._read(hit)
        return told + self.folder.expire(self.scanner.number)

    def settle(self, now: float) -> list[Incident]:
        """The open incidents that have been quiet by *now* (monotonic seconds), told once; more may still fold."""
        return self.folder.settle(now)

    def close(self) -> list[Incident]:
        """The incidents still open, with the end of the stream as their end."""
        told: list[Incident] = []
        for hit in self.scanner.close():
            told += self._read(hit)
        for line, hit in self._pieces.close():
            told += self._line(line, hit)
        told += self.folder.close()
        if self.transcript is not None:
            told += self.transcript.judge()
        return told

    def _read(self, hit: Hit) -> list[Incident]:
        raw = hit.raw
        if self.sessions and self.transcript is None and self.chosen in (Format.AUTO, Format.PLAIN) and opens(raw):
            self.transcript = Transcript()
        if self.transcript is not None and self.transcript.take(raw, hit):
            self.scanner.every = max(self.scanner.every, 1)
        if self.scanner.export:
            line = lines.export(raw)
            return self._line(line, hit) if line is not None else []
        whole = self._pieces.take(hit)
        if self._pieces.waiting:
            self.scanner.every = max(self.scanner.every, 1)
        if whole is None:
            return []
        told: list[Incident] = []
        line, at = whole
        if hit.head:
            line.speaker.inherit(lines.plain(hit.head.partition(b"\r")[0]).speaker)
        for text in line.text.split(b"\r") if b"\r" in line.text else (line.text,):
            part = line if text is line.text else lines.plain(text, line.speaker, line.stamp, line.clock)
            told += self._line(part, at)
        return told

    def _line(self, line: Line, hit: Hit) -> list[Incident]:
        claimed = claims(line)
        if not claimed:
            return []
        told = self.folder.expire(hit.number, line.clock, line.time)
        # the retry last: what failed on the same line failed before it
        for claim in sorted(claimed, key=lambda claim: claim.signature.role is Role.RETRY):
            role = claim.signature.role
            if role is Role.PHASE or role is Role.START:
                if not (self._bare(line.speaker) and self._quoted(hit)):
                    told += self._phase(line.speaker, claim, hit.number)
                continue
            seen = self._sighting(line, claim, hit)
            if role in ALARMS and self._bare(line.speaker) and self.folder.is_new(seen) and self._quoted(hit):
                continue
            told += self.folder.add(seen)
        return told

    @staticmethod
    def _bare(speaker: Speaker) -> bool:
        """Whether a line has no prefix of its own, so that it may go on a quotation of the line above."""
        return not speaker.level and speaker.pid is None and speaker.rank is None and not speaker.program

    def _quoted(self, hit: Hit) -> bool:
        """Whether the nearest line above with a prefix is a request logger's whose quoted text is still open."""
        if REQUEST_LOGGER.search(self.scanner.text_before(hit, MOST_QUOTED_BYTES)) is None:
            return False
        below: list[bytes] = []
        for line in islice(self._above(hit), MOST_QUOTED_LINES):
            if quotes_on(line.text, below):
                return True
            if not self._bare(line.speaker):
                return False
            below.append(line.text)
        return False

    def _phase(self, speaker: Speaker, claim: Claim, number: int) -> list[Incident]:
        signature = claim.signature
        version = claim.fields.get("version")
        whose = identity(speaker)
        if signature.role is Role.START or signature.phase == "runtime":
            for key in [key for key in self._phases if key[0] == whose]:
                del self._phases[key]
            self.folder.forget(whose)
        if signature.role is Role.START:
            return self.folder.start(whose, signature.engine, str(version or ""))
        if signature.phase:
            # a server that is up serves with all its processes
            key = (whose, None) if signature.phase == "runtime" else _process(speaker)
            self._phases[key] = signature.phase, number
            if len(self._phases) > MOST_PROCESSES:
                del self._phases[next(iter(self._phases))]
        if signature.engine and version:
            return self.folder.start(whose, signature.engine, str(version), speaker.pid)
        return []

    def _sighting(self, line: Line, claim: Claim, hit: Hit) -> Sighting:
        speaker = line.speaker
        unknown = ("", hit.number)
        standing, since = self._phases.get(_process(speaker)) or self._phases.get((identity(speaker), None), unknown)
        if hit.number - since > WINDOW_LINES and standing != "runtime":
            standing = ""
        seen = Sighting(claim, speaker, hit.number, hit.offset, line.clock, line.time, standing=standing)
        needed = claim.signature.role is Role.CAUSE and EXCEPTION.search(line.text) is not None
        needed = needed and not self.folder.settled(seen) and self.scanner.frames_above(hit)
        if not line.stamp:
            seen.clock, seen.time = self._moment(hit)
            seen.borrowed = True
        if needed:
            self._note(seen, look_above(self._above(hit), speaker))
        return seen

    def _moment(self, hit: Hit) -> tuple[str, float | None]:
        """The nearest time above a line that has none."""
        for raw in self.scanner.before(hit, STAMP_LINES):
            if STAMP.search(raw[:STAMP_BYTES]) is not None:
                line = lines.unwrap(raw[:MOST_BYTES_ABOVE], self.chosen)
                if line.stamp:
                    return line.clock, line.time
        return "", None

    @staticmethod
    def _note(seen: Sighting, above: Above) -> None:
        seen.frames = above.phases
        if above.speaker is not None and seen.speaker.pid is None and seen.speaker.rank is None:
            seen.speaker.pid, seen.speaker.rank, seen.speaker.name = (
                above.speaker.pid,
                above.speaker.rank,
                above.speaker.name,
            )
            seen.kind = seen.speaker.kind

    def _above(self, hit: Hit) -> Iterator[Line]:
        """The messages above *hit*, the nearest first; pieces of one line are joined."""
        lower: Line | None = None
        for raw in self.scanner.before(hit, MOST_LINES_ABOVE):
            if self.scanner.export:
                if raw.startswith(b"MESSAGE="):
                    yield lines.plain(raw[8:])
                continue
            part = lines.piece(raw[:MOST_BYTES_ABOVE], self.chosen)
            if lower is not None and (part is None or not part[1]):
                yield lines.plain(lower.text, None, lower.stamp, lower.clock)
                lower = None
            line = lines.unwrap(raw[:MOST_BYTES_ABOVE], self.chosen)
            if part is None:
                yield line
            else:
                lower = Line(part[0] + (lower.text if lower is not None else b""), stamp=line.stamp, clock=line.clock)
        if lower is not None:
            yield lines.plain(lower.text, None, lower.stamp, lower.clock)


def _process(speaker: Speaker) -> tuple[str, int | str | None]:
    return identity(speaker), speaker.pid if speaker.pid is not None else speaker.rank
