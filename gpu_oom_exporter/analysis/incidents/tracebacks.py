"""What was the process doing? The traceback above an exception, read upwards, for its phase and its speaker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import re2

from gpu_oom_exporter.analysis.incidents.lines import Line, Speaker
from gpu_oom_exporter.catalog.signatures import FRAMES

MOST_FRAMES = 200
MOST_STRAY = 100
"""Lines of other writers without a prefix that may stand inside a traceback."""

OTHER_END = re.compile(rb"[\w.]{0,200}(?:Error|Exception|Interrupt|Exit|Resources)\b(?::|\(|$)")
"""The last line of another traceback: what stands above it belongs to that one."""

HEADER = b"Traceback (most recent call last)"
NOISE = re.compile(rb"[\^~ ]*$|.{0,200}\d+%|\[Previous line repeated|\.\.\.|During handling|The above exception")
COMPILED = tuple((phase, re2.compile(f"(?m){pattern}".encode())) for phase, pattern in FRAMES)


@dataclass(slots=True)
class Above:
    """What stands above a line: phases by its frames, and who printed the header."""

    phases: tuple[str, ...] = ()
    speaker: Speaker | None = None


def look_above(above: Iterator[Line], speaker: Speaker) -> Above:
    """Read the traceback above a line of *speaker*, upwards."""
    found = Above()
    frames: list[bytes] = []
    stray = 0
    for line in above:
        header = HEADER in line.text
        if not _same(line.speaker, speaker) and not (header and speaker.pid is None and speaker.rank is None):
            continue
        if header:
            found.speaker = line.speaker
            break
        if line.text.startswith(b'File "'):
            frames.append(line.text)
        elif line.indent < 4 and OTHER_END.match(line.text) is not None:
            break
        elif line.indent < 4 and NOISE.match(line.text) is None:
            stray += 1
        if stray > MOST_STRAY or len(frames) > MOST_FRAMES:
            break
    if frames:
        text = b"\n".join(frames)
        found.phases = tuple(phase for phase, pattern in COMPILED if pattern.search(text) is not None)
    return found


def _same(one: Speaker, other: Speaker) -> bool:
    return (one.pid, one.rank, one.stream) == (other.pid, other.rank, other.stream)
