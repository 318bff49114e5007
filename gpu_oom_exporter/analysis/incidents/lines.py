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


_ISO = rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVELS = rb"DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE"

_TAG = rb"(?P<tag>[\w./@()-]{1,80})(?:\[(?P<tagpid>\d+)\])?: ?"

_PREFIXES: dict[bytes, tuple[re.Pattern[bytes], ...]] = {
    b"(": (
        re.compile(
            rb"\((?P<name>[\w.:<>-]{0,80})(?: rank=(?P<rank>\d+))?(?: ?pid=(?P<pid>\d+))?(?:, ip=[^,)]{1,60})?\)"
            rb"(?: \[repeated \d+x across cluster\])? ?"
        ),
    ),
    b"[": (
        re.compile(
            rb"\[(?:(?P<iso>" + _ISO + rb")|(?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d))"
            rb"(?P<ranks>(?: (?:DP|TP|PP|EP|ATTN_TP|MOE_EP)\d+)+)?\] ?"
        ),
        re.compile(rb"\[rank(?P<rank>\d+)\]:? ?"),
        re.compile(rb"\[(?:default)?\d+(?:,\d+)?\](?:<std(?:err|out)>)?: ?"),
        re.compile(rb"\[pod/(?P<stream>[^\]]{1,300})\] "),
        re.compile(rb"\[ *(?P<boot>\d+\.\d+)\](?:\[ *[TC]\d+\])? "),
        re.compile(rb"\[[A-Z][a-z]{2} (?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \d{4}\] "),
        re.compile(rb"\[\d{10}\] "),
        re.compile(rb"\[(?P<level>" + _LEVELS + rb")\] "),
        re.compile(
            rb"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[T[A-Za-z]*RT(?:-LLM)?\](?: \[RANK (?P<rank>\d+)\])? \[[A-Z]\] "
        ),
        re.compile(rb"\[TensorRT-LLM\]\[(?P<level>" + _LEVELS + rb")\] "),
        re.compile(rb"\[TM\]\[(?P<level>" + _LEVELS + rb")\] "),
    ),
    b"<": (re.compile(rb"<\d{1,3}>"),),
    b" ": (re.compile(rb" {2,8}[|+] +(?=\S)"),),
}  # fmt: skip
_WORD = (
    re.compile(
        rb"(?P<level>" + _LEVELS + rb") (?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? \[?[\w./-]{1,120}\.py:\d+\] ?"
    ),
    re.compile(
        rb"(?:" + _LEVELS + rb") (?P<iso>" + _ISO + rb") \[resource\.labels\.containerName: (?P<stream>[^\]]{1,300})\] "
    ),
    re.compile(rb"(?P<level>" + _LEVELS + rb"):?[ \t]+(?=\S)"),
    re.compile(rb"(?P<level>" + _LEVELS + rb"):[\w.]{1,80}:"),
    re.compile(
        rb"(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) [\w.-]{1,253} " + _TAG
    ),
    re.compile(rb"(?P<letter>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]{1,120}:\d+\] ?"),
    re.compile(rb"time=\S{1,60} level=(?P<level>[A-Za-z]+) "),
    re.compile(rb"(?P<stream>[A-Za-z0-9][\w.-]{0,120}) *\| "),
    re.compile(rb"[\w.-]{1,120}:(?P<ncclpid>\d+):\d+ \[\d+\] "),
    re.compile(rb"(?P<tag>systemd|systemd-oomd|earlyoom|dockerd|kubelet|kernel)(?:\[\d+\])?: "),
    re.compile(rb"E {3}(?=\S)"),
)  # fmt: skip
_DIGIT = (
    re.compile(rb"(?P<iso>" + _ISO + rb") std(?:out|err) [PF] "),
    re.compile(
        rb"(?P<iso>\d{4}-\d\d-\d\dT\S{8,30}) [\w.-]{1,253} "
        rb"(?P<tag>kernel|[\w./@()-]{1,80}(?=\[))(?:\[(?P<tagpid>\d+)\])?: ?"
    ),
    re.compile(rb"(?P<iso>" + _ISO + rb")\s+"),
    re.compile(rb"\d+\.\d\d\.\d{3}\.\d{3} (?P<letter>[DIWE]) +(?:(?:srv|slot|cmn|que|main) +)?"),
    re.compile(rb"\d+,\d+,(?P<usec>\d+),[^;]{0,40};"),
)  # fmt: skip
CLOCKS = frozenset({"boot", "usec", "iso", "vllm", "syslog"})
"""Kinds of time stamp; only stamps of one kind can be compared."""

_LETTER_LEVELS = {b"D": "DEBUG", b"I": "INFO", b"W": "WARNING", b"E": "ERROR", b"F": "CRITICAL"}
RELAY = re.compile(rb"(?:\w{1,60}(?:::\w{1,60}){1,8}|text_generation_launcher): ")
"""Rust programs that pass a worker's lines on: the level is the relay's, not the line's."""

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
        candidates = _WORD
    else:
        candidates = _PREFIXES.get(first, ())
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
            speaker.pid = int(value)
        elif name == "name":
            speaker.name = value.decode()
        elif name == "rank":
            speaker.rank = int(value)
        elif name == "ranks":
            speaker.rank = value.decode().strip()
        elif name == "stream":
            speaker.stream = value.decode("utf-8", "replace")
        elif name == "letter":
            speaker.level = _LETTER_LEVELS[value]
        elif name == "tag":
            speaker.program = value.decode()
        elif name == "tagpid" and speaker.program not in REPORTERS:
            speaker.reporter_pid = int(value)


def unwrap(raw: bytes, chosen: Format = Format.AUTO) -> Line:
    """The message of one raw line, whichever wrapper it has of those that *chosen* allows."""
    if chosen in (Format.AUTO, Format.DOCKER_JSON, Format.JOURNAL) and raw[:1] == b"{":
        record = _record(raw)
        if record is not None:
            if chosen is not Format.JOURNAL and "log" in record and ("stream" in record or "time" in record):
                return plain(_bytes(record["log"]).rstrip(b"\n"), None, _bytes(record.get("time")), "iso")
            if chosen is not Format.DOCKER_JSON and "MESSAGE" in record:
                return journal(record)
    return plain(raw)


_PIECE = re.compile(rb"^" + _ISO + rb" std(?:out|err) (?P<flag>[PF]) ", re.S)


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
    if speaker.program not in REPORTERS and isinstance(pid, str) and pid.isdigit():
        speaker.reporter_pid = int(pid)
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
            return datetime.fromisoformat(text[:19]).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None
    return None
