"""What did the program itself say on this line? Takes off wrappers (docker, CRI, journald), colours and prefixes.

The input is one raw line, as bytes; the output is a `Line` whose text is the message alone.
Every expression here is anchored and has no nested repetition, so a hostile line costs no more than its length.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from gpu_oom_exporter.catalog import prefixes
from gpu_oom_exporter.catalog.voice import SHIPPERS


class Format(StrEnum):
    """How a log is wrapped; `AUTO` looks at every line."""

    AUTO = "auto"
    PLAIN = "plain"
    DOCKER_JSON = "docker-json"
    CRI = "cri"
    JOURNAL = "journal"
    KERNEL = "kernel"


REPORTERS = frozenset(
    {"kernel", "systemd", "kubelet", "dockerd", "containerd", "systemd-oomd", "earlyoom", "oomd", "crio"}
)
"""Programs whose lines are about other processes: their own PID is nobody's."""

ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(slots=True)
class Speaker:
    """Who wrote a line, as far as prefixes and wrappers say."""

    stream: str = ""  # compose service, pod or container
    name: str = ""  # name in an engine prefix: EngineCore_DP0, Worker_TP1
    pid: int | None = None  # PID in an engine prefix
    rank: int | str | None = None
    reporter_pid: int | None = None  # journald's _PID or the PID of a syslog tag, of a program that speaks of itself
    program: str = ""  # journald's SYSLOG_IDENTIFIER or the syslog tag
    level: str = ""
    node: str = ""  # address in a Ray prefix: PIDs of two nodes are not the same

    def inherit(self, other: Speaker) -> None:
        """Take from *other* what is not known; who of an engine speaks is known as a whole or not at all."""
        self.stream = self.stream or other.stream
        if self.reporter_pid is None:
            self.program, self.reporter_pid = self.program or other.program, other.reporter_pid
        if self.pid is None and self.rank is None:
            self.name, self.pid, self.rank, self.node = other.name, other.pid, other.rank, other.node

    @property
    def kind(self) -> str:
        """The name without its numbers: ranks of one job are of one kind."""
        return re.sub(r"\d+", "#", self.name)


@dataclass(slots=True)
class Line:
    """One message. *indent* is how many spaces stood before it; *stamp* and *clock* are its time, uninterpreted."""

    text: bytes
    speaker: Speaker = field(default_factory=Speaker)
    indent: int = 0
    stamp: bytes = b""
    clock: str = ""

    @property
    def time(self) -> float | None:
        """Seconds on the clock `clock`; only differences on one clock mean anything."""
        return seconds(self.stamp, self.clock)


def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[bytes], ...]:
    return tuple(re.compile(pattern.encode()) for pattern in patterns)


_DIGIT, _LETTER = _compiled(prefixes.DIGIT), _compiled(prefixes.LETTER)
_BY_FIRST = {
    b"(": _compiled(prefixes.PARENTHESIS),
    b"[": _compiled(prefixes.BRACKET),
    b"<": _compiled(prefixes.ANGLE),
    b"-": _compiled(prefixes.DASH),
    b"|": _compiled(prefixes.BAR),
    b" ": _compiled(prefixes.BLANK),
}
CLOCKS = frozenset({"boot", "usec", "iso", "vllm", "syslog"})
"""Kinds of time stamp; only stamps of one kind can be compared."""

_LETTER_LEVELS = {b"D": "DEBUG", b"I": "INFO", b"W": "WARNING", b"E": "ERROR", b"F": "CRITICAL"}
RELAY = re.compile(prefixes.RELAY.encode())
MOST_PREFIXES = 10


def plain(raw: bytes, speaker: Speaker | None = None, stamp: bytes = b"", clock: str = "") -> Line:
    """The message in *raw*, a line without wrapper, whose writer may be known already."""
    line = Line(raw, speaker or Speaker(), stamp=stamp, clock=clock)
    text = ESCAPES.sub(b"", raw) if b"\x1b" in raw else raw
    for _ in range(MOST_PREFIXES):
        taken = _take_prefix(text, line)
        if not taken:
            break
        text = text[taken:]
    if RELAY.match(text) is not None:
        line.speaker.level = ""
    stripped = text.lstrip(b" \t")
    line.indent = len(text) - len(stripped)
    line.text = stripped.rstrip()
    return line


def _take_prefix(text: bytes, line: Line) -> int:
    """Length of one prefix at the start of *text*, noted in *line*; 0 without one."""
    first = text[:1]
    candidates: tuple[re.Pattern[bytes], ...]
    if first.isdigit():
        candidates = _DIGIT
    elif first.isalnum():
        candidates = _LETTER
    else:
        candidates = _BY_FIRST.get(first, ())
    for pattern in candidates:
        match = pattern.match(text)
        if match is None:
            continue
        found = match.groupdict()
        if first == b"(" and found.get("pid") is None and found.get("name") != b"raylet":
            continue
        _note(found, line)
        return match.end()
    return 0


def _note(found: dict[str, bytes | Any], line: Line) -> None:
    speaker = line.speaker
    for name, value in found.items():
        if value is None:
            continue
        if name in CLOCKS:
            # the outermost stamp counts: only wrappers stamp every line
            if not line.stamp:
                line.stamp, line.clock = value, name
        elif name == "level":
            speaker.level = value.decode().upper()
        elif name == "pid" or (name == "ncclpid" and speaker.pid is None):
            speaker.pid = number(value)
        elif name == "name":
            speaker.name = value.decode()
        elif name == "node":
            speaker.node = value.decode("utf-8", "replace")
        elif name == "rank":
            speaker.rank = number(value)
        elif name == "ranks":
            speaker.rank = value.decode().strip()
        elif name == "stream":
            speaker.stream = value.decode("utf-8", "replace")
        elif name == "letter":
            speaker.level = _LETTER_LEVELS[value]
        elif name in ("tag", "tag2"):
            speaker.program = value.decode()
        elif name == "tagpid" and speaker.program not in REPORTERS:
            speaker.reporter_pid = number(value)


def number(digits: bytes | str) -> int | None:
    """A PID or rank; ``None`` for what is none, or too long to be one."""
    text = digits.decode("latin-1") if isinstance(digits, bytes) else digits
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


def unwrap(raw: bytes, chosen: Format = Format.AUTO) -> Line:
    """The message of one raw line, whichever wrapper it has of those that *chosen* allows."""
    if chosen in (Format.AUTO, Format.DOCKER_JSON, Format.JOURNAL) and raw[:1] == b"{":
        record = _record(raw)
        if record is not None:
            if chosen is not Format.JOURNAL and isinstance(record.get("log"), str) and record.keys() & DOCKER_KEYS:
                return plain(_bytes(record["log"]).rstrip(b"\n"), None, _bytes(record.get("time")), "iso")
            if chosen is Format.AUTO and (shipped := _shipped(record)) is not None:
                return plain(_bytes(shipped).rstrip(b"\n"))
            if chosen is not Format.DOCKER_JSON and "MESSAGE" in record:
                return journal(record)
    return plain(raw)


DOCKER_KEYS = frozenset({"stream", "time", "kubernetes"})
"""Keys beside ``log`` in docker's json-file and in what Fluent Bit makes of it."""


def _shipped(record: dict[str, Any]) -> str | None:
    """The line that a log shipper's record holds as the program wrote it.

    The shipper's own level is that of standard output or error, and is left out; a level of the program is not.
    """
    payload = record.get("jsonPayload")
    if isinstance(payload, dict) and isinstance(payload.get("message"), str):
        return json.dumps(payload) if "level" in payload or "severity" in payload else str(payload["message"])
    for key, beside, within in SHIPPERS:
        known = record.get(beside)
        if isinstance(record.get(key), str) and known is not None and (not within or _has(known, within)):
            nested = record.get("log")
            return None if isinstance(nested, dict) and "level" in nested else str(record[key])
    return None


def _has(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


_PIECE = re.compile(rf"{prefixes.ISO} std(?:out|err) (?P<flag>[PF]) ".encode())


def piece(raw: bytes, chosen: Format) -> tuple[bytes, bool] | None:
    """If *raw* is one piece of a wrapped line: its part of the message, and whether more follows."""
    if chosen in (Format.AUTO, Format.CRI) and raw[:1].isdigit():
        if match := _PIECE.match(raw):
            return raw[match.end() :], match["flag"] == b"P"
    elif chosen in (Format.AUTO, Format.DOCKER_JSON) and raw[:1] == b"{":
        record = _record(raw)
        if record is not None and isinstance(record.get("log"), str) and "stream" in record:
            text = _bytes(record["log"])
            return text.rstrip(b"\n"), not text.endswith(b"\n")
    return None


def journal(record: dict[str, Any]) -> Line:
    """The message of one journal entry (``journalctl -o json`` or ``-o export``)."""
    speaker = Speaker(program=str(record.get("SYSLOG_IDENTIFIER") or record.get("_COMM") or ""))
    if record.get("_TRANSPORT") == "kernel":
        speaker.program = "kernel"
    pid = record.get("_PID")
    if speaker.program not in REPORTERS and isinstance(pid, str):
        speaker.reporter_pid = number(pid)
    container = record.get("CONTAINER_NAME")
    speaker.stream = str(container or "")
    stamp = _bytes(record.get("__REALTIME_TIMESTAMP"))
    return plain(_bytes(record.get("MESSAGE")), speaker, stamp, "usec")


def export(block: bytes) -> Line | None:
    """The message of one ``journalctl -o export`` record; binary fields are length-prefixed."""
    record: dict[str, Any] = {}
    at = 0
    while at < len(block):
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        name, equals, value = block[at:end].partition(b"=")
        at = end + 1
        if not equals:
            size = int.from_bytes(block[at : at + 8], "little")
            value = block[at + 8 : at + 8 + size]
            at += 8 + size + 1
        record[name.decode("latin-1")] = value if name == b"MESSAGE" else value.decode("utf-8", "replace")
    return journal(record) if "MESSAGE" in record else None


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _bytes(value: Any) -> bytes:
    """A JSON text, or journald's array of byte numbers, as bytes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in value):
        return bytes(value)
    return b""


_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)$")

LEAP_YEAR = 2000
"""Stands in where a stamp has no year, so that 29 February exists."""


def seconds(stamp: bytes, clock: str) -> float | None:
    """*stamp* in seconds; the origin depends on *clock*, and where a year is missing it is the same for all."""
    text = stamp.decode("latin-1")
    try:
        if clock == "boot":
            return float(text)
        if clock == "usec":
            return int(text) / 1e6
        if clock == "vllm":
            return datetime.fromisoformat(f"{LEAP_YEAR}-{text}").replace(tzinfo=UTC).timestamp()
        if clock == "syslog":
            return datetime.strptime(f"{LEAP_YEAR} {text}", "%Y %b %d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        if clock == "iso":
            moment = datetime.fromisoformat(text[:19]).replace(tzinfo=UTC).timestamp()
            offset = _OFFSET.search(text)
            if offset is None:
                return moment
            east = int(offset[2]) * 3600 + int(offset[3]) * 60
            return moment - east if offset[1] == "+" else moment + east
    except (ValueError, OverflowError):
        return None
    return None
