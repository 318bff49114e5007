"""Joins lines that a container runtime has split: docker's pieces of 16 KiB, CRI's ``P``."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_oom_exporter.analysis.incidents import lines
from gpu_oom_exporter.analysis.incidents.lines import Format, Line
from gpu_oom_exporter.analysis.incidents.scanning import LONGEST_BYTES, Hit

MOST_PIECES = 400
"""A split line that has more pieces, or whose end is further away in lines, is read as far as it came."""


@dataclass(slots=True)
class _Split:
    first: Hit
    texts: list[bytes] = field(default_factory=list)
    size: int = 0


class Pieces:
    """The split lines of one stream that are not complete, of standard output and of standard error."""

    def __init__(self, chosen: Format) -> None:
        self.chosen = chosen
        self._open: dict[bytes, _Split] = {}

    @property
    def waiting(self) -> bool:
        """Whether the next line may be a piece, anchor or not."""
        return bool(self._open)

    @property
    def low_water(self) -> int | None:
        """Offset of the oldest piece."""
        return min((split.first.offset for split in self._open.values()), default=None)

    def take(self, hit: Hit) -> tuple[Line, Hit] | None:
        """The line of *hit*, or the whole of which it is the last piece, with its first; ``None`` while it goes on."""
        part = lines.piece(hit.raw, self.chosen)
        if part is None:
            self._forget(hit)
            return lines.unwrap(hit.raw, self.chosen), hit
        text, more = part
        key = b"stderr" if b"stderr" in hit.raw[:64] or b'"stderr"' in hit.raw[-160:] else b"stdout"
        split = self._open.pop(key, None) or _Split(hit)
        if more and len(split.texts) < MOST_PIECES:
            if split.size < LONGEST_BYTES:
                split.texts.append(text)
                split.size += len(text)
            self._open[key] = split
            return None
        last = lines.unwrap(hit.raw, self.chosen)
        if not split.texts:
            return last, hit
        return lines.plain(b"".join((*split.texts, text)), None, last.stamp, last.clock), split.first

    def close(self) -> list[tuple[Line, Hit]]:
        """What came of lines whose end did not."""
        rest = [(lines.plain(b"".join(split.texts)), split.first) for split in self._open.values()]
        self._open.clear()
        return rest

    def _forget(self, hit: Hit) -> None:
        for key, split in tuple(self._open.items()):
            if hit.number - split.first.number > MOST_PIECES:
                del self._open[key]
