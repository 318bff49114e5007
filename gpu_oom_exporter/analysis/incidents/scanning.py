"""Which lines are worth reading? A prefilter over whole chunks, with line numbers, offsets and a look back.

google-re2 searches a chunk for the anchors of all signatures at once; only lines with an anchor are looked at.
What a line's meaning needs of the lines around it (a traceback above, the rest of a split line below) is read
on demand from a bounded past, or line by line for a bounded while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import re2

from gpu_oom_exporter.analysis.incidents.lines import Format
from gpu_oom_exporter.catalog.signatures import SIGNATURES
from gpu_oom_exporter.catalog.transcripts import OPENER

PAST_BYTES = 131072
"""How far back a traceback may begin: vLLM's deepest are about 20 KiB, five times that in journald's byte arrays."""

LONGEST_BYTES = 524288
"""A longer line is read at its head and tail only: docker splits at 16 KiB, journald at 48 KiB."""

END_BYTES = 65536
"""How much of an overlong line's head and tail is read."""

HEAD_BYTES = 512
"""How much of the beginning of a progress bar's line is kept: its prefix says whose it is."""

ANCHORS = tuple(dict.fromkeys(s.anchor.encode() for s in SIGNATURES))

PREFILTER = re2.compile(
    b"|".join(
        (
            *(re2.escape(anchor) for anchor in ANCHORS),
            rb"(?m:^" + OPENER.encode() + rb")",
            rb"std(?:out|err) P ",  # CRI: a piece with more to come
            rb'(?:[^n\n]|[^\\\n]n)", ?"stream"',  # docker: a piece, because its text does not end with a newline
            rb'"MESSAGE" ?: ?\[',  # journald: text as an array of bytes
        )
    )
)


@dataclass(frozen=True, slots=True)
class Hit:
    """One raw line, one segment of a progress bar, or one record of a journal export.

    *number* counts from 1, *offset* from byte 0; *head* is how the line of a segment begins.
    """

    raw: bytes
    number: int
    offset: int
    head: bytes = b""


class Scanner:
    """Finds the lines of one stream that hold an anchor. Memory: one overlong line and `PAST_BYTES`."""

    def __init__(self, chosen: Format = Format.AUTO) -> None:
        self.export: bool | None = None if chosen in (Format.AUTO, Format.JOURNAL) else False
        self.every = 0  # how many lines from here on are wanted whether or not they hold an anchor
        self.number = 0  # complete lines behind us
        self.offset = 0  # of the first byte of `_carry`
        self._carry = b""
        self._lost = 0  # bytes dropped from the middle of the overlong line in `_carry`
        self._past = b""
        self._whole = b""

    @property
    def _end_of_record(self) -> bytes:
        return b"\n\n" if self.export else b"\n"

    def feed(self, data: bytes) -> Iterator[Hit]:
        """Hits in what *data* completes; the rest waits for more."""
        if b"\n" not in data and len(self._carry) + len(data) <= LONGEST_BYTES:
            self._carry += data
            return
        self._carry += data
        if self.export is None and b"\n" in self._carry:
            self.export = self._carry.startswith((b"__CURSOR=", b"__REALTIME_TIMESTAMP=", b"_BOOT_ID="))
        if self._lost and b"\n" in self._carry:
            yield from self._finish_overlong()
        cut = self._carry.rfind(self._end_of_record) + len(self._end_of_record)
        if cut < len(self._end_of_record):
            cut = 0
        if cut:
            block, self._carry = self._carry[:cut], self._carry[cut:]
            yield from self._scan(block, len(block))
        if len(self._carry) > LONGEST_BYTES:
            if not self._lost and (cut := self._carry.rfind(b"\r") + 1):
                block, self._carry = self._carry[:cut], self._carry[cut:]
                yield from self._scan(block, len(block))
            if len(self._carry) > LONGEST_BYTES:
                self._lost += len(self._carry) - 2 * END_BYTES
                self._carry = self._carry[:END_BYTES] + self._carry[-END_BYTES:]

    def close(self) -> Iterator[Hit]:
        """Hits in a last line without an end."""
        rest, self._carry = self._carry, b""
        if self._lost:
            rest = _ends(rest)
        if rest:
            yield from self._scan(rest, len(rest) + self._lost)
        self._lost = 0

    def _finish_overlong(self) -> Iterator[Hit]:
        end = self._carry.find(b"\n")
        line, self._carry = self._carry[:end], self._carry[end + 1 :]
        lost, self._lost = self._lost, 0
        yield from self._scan(_ends(line) + b"\n", len(line) + 1 + lost)

    def _scan(self, block: bytes, length: int) -> Iterator[Hit]:
        """Hits in *block*, which is complete and was *length* bytes long in the stream."""
        whole = self._past + block
        base = at = counted = len(self._past)
        self._whole = whole
        number = self.number
        while at < len(whole):
            if self.every > 0:
                self.every -= 1
                start, end, line = at, whole.find(b"\n", at), at
                end = len(whole) if end < 0 else end
                number += whole.count(b"\n", counted, start)
                counted, at = start, end + 1
            else:
                match = PREFILTER.search(whole, at)
                if match is None:
                    break
                found, after = match.span()
                start, end, line = self._bounds(whole, found, after, base)
                number += whole.count(b"\n", counted, found if self.export else start)
                counted, at = (found if self.export else start), max(end, after) + 1
            raw = whole[start:end]
            if len(raw) > LONGEST_BYTES:
                raw = _ends(raw)
                if PREFILTER.search(raw) is None:
                    continue
            head = whole[line : min(start, line + HEAD_BYTES)] if line < start else b""
            yield Hit(raw, number + 1, self.offset + start - base, head)
        self.number += block.count(b"\n")
        self.offset += length
        self._past = whole[-PAST_BYTES:]
        self._whole = b""

    def _bounds(self, whole: bytes, found: int, after: int, base: int) -> tuple[int, int, int]:
        """Where the line, bar segment or record around a match begins and ends, and where its line begins."""
        record = self._end_of_record
        start = whole.rfind(record, base, found)
        start = base if start < 0 else start + len(record)
        end = whole.find(record, after)
        end = len(whole) if end < 0 else end
        line = start
        if not self.export:
            start = max(start, whole.rfind(b"\r", start, found) + 1)
            segment = whole.find(b"\r", after, end)
            end = segment if segment >= 0 else end
        return start, end, line

    def _place(self, hit: Hit) -> int:
        """Where *hit* begins in the text at hand, of this block and of the past."""
        return max(0, len(self._past) + hit.offset - self.offset)

    def frames_above(self, hit: Hit) -> bool:
        """Whether a traceback can stand above *hit*."""
        start = self._place(hit)
        past = max(0, start - PAST_BYTES), start
        return any(self._whole.rfind(sign, *past) >= 0 for sign in (b"File ", b"Traceback", b'"MESSAGE"'))

    def text_before(self, hit: Hit, most: int) -> bytes:
        """The raw bytes before *hit*, at most *most* of them."""
        start = self._place(hit)
        return self._whole[max(0, start - most) : start]

    def before(self, hit: Hit, most: int) -> Iterator[bytes]:
        """The raw lines before *hit*, the nearest first, at most *most* of them and of `PAST_BYTES`."""
        start = self._place(hit)
        end, floor = start - 1, max(0, start - PAST_BYTES)
        for _ in range(most):
            if end <= floor:
                return
            start = self._whole.rfind(b"\n", floor, end) + 1
            if start == 0:
                start = floor
                if floor > 0:
                    return
            yield self._whole[start:end]
            end = start - 1


def _ends(line: bytes) -> bytes:
    """The head and the tail of an overlong line, as one."""
    return line[:END_BYTES] + b" ... " + line[-END_BYTES:]
