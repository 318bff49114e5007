"""Is it the program that speaks? Tells a program's own message from quoted text, advice and source code.

A request logger prints what users write, and users write about out-of-memory errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_oom_exporter.catalog import voice as words

CODE = re.compile(words.CODE.encode())
QUOTED = re.compile(words.QUOTED.encode(), re.I)
PERHAPS_QUOTED = re.compile(words.PERHAPS_QUOTED.encode(), re.I)
TEXT_KEY = re.compile(rb"[\"']?(?:" + words.TEXT_KEY.encode() + rb")", re.I)
TEXT_KEY_LAST = re.compile(rb"(?:" + words.TEXT_KEY.encode() + rb")$", re.I)
LISTED = re.compile(words.LISTED.encode(), re.I)
FAILING = re.compile(words.FAILING.encode(), re.I)
OWN_QUOTE = re.compile(words.OWN_QUOTE.encode(), re.I)
QUIET = re.compile(words.QUIET.encode(), re.I)
ERROR_KEY = re.compile(words.ERROR_KEY.encode())
OVERCOME = re.compile(words.OVERCOME.encode(), re.I)
FORGIVEN = re.compile(words.FORGIVEN.encode(), re.I)
OPENED = re.compile(rb"(?:" + words.REQUEST_LOGGER.encode() + rb")", re.I)
TEXT_BEGINS = re.compile(rb"(?:" + words.TEXT_KEY.encode() + rb")\[?(?P<quote>[\"'])", re.I)

LEAD_BYTES = 4096
"""How much of what stands before a message is looked at."""

BEHIND_BYTES = 200
"""How far behind a message the program says that it got over it."""

QUIET_LEVELS = frozenset({"INFO", "DEBUG", "TRACE", "NOTICE"})
LOUD_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL"})


def own_voice(text: bytes, indent: int, start: int, level: str) -> bool:
    """Whether what begins at *start* of *text* is the program's, in a line of *level* (empty when it tells none)."""
    if indent >= 4 and CODE.match(text) is not None:
        return False
    if start == 0:
        return True
    lead = text[:start][-LEAD_BYTES:]
    loud = level in LOUD_LEVELS
    if QUOTED.search(lead) is not None or (LISTED.match(lead) is not None and not loud):
        return False
    key = TEXT_KEY.search(lead)
    # words of failure count only before somebody's text: users write them, too
    failing = loud or FAILING.search(lead[: key.start()] if key else lead) is not None
    if not failing and (key is not None or PERHAPS_QUOTED.search(lead) is not None):
        return False
    opener = open_quote(lead)
    if opener is None:
        return True
    before = lead[max(0, opener - 80) : opener]
    if TEXT_KEY_LAST.search(before) is not None:
        return False
    return OWN_QUOTE.search(before) is not None or (failing and before.rstrip().endswith(b":"))


def overcome(text: bytes, start: int, end: int, level: str, survivable: bool) -> bool:
    """Whether the line's level, or what follows the message at *start* to *end*, says that the program went on.

    *survivable* is whether a program can get over such a failure at all.
    """
    lead, behind = text[:start], text[end : end + BEHIND_BYTES]
    if level in QUIET_LEVELS or (not level and QUIET.search(lead[:300]) is not None):
        return ERROR_KEY.search(lead) is None
    pattern = OVERCOME if level in LOUD_LEVELS else FORGIVEN
    return survivable and pattern.search(behind) is not None


def open_quote(lead: bytes) -> int | None:
    """Where the quote begins that is still open at the end of *lead*; ``None`` outside of quotes."""
    if lead.count(b'"') % 2:
        return lead.rfind(b'"')
    opened = None
    for match in re.finditer(rb"'", lead):
        at = match.start()
        before, after = lead[at - 1 : at] if at else b"", lead[at + 1 : at + 2]
        if opened is None and not before.isalnum() and (not after or not after.isspace()):
            opened = at
        elif opened is not None and not after.isalnum():
            opened = None
    return opened


def quotes_on(text: bytes, below: Sequence[bytes]) -> bool:
    """Whether *text* is a request logger's line whose quoted text is not closed in it, nor in the lines *below*."""
    if OPENED.search(text[:LEAD_BYTES]) is None:
        return False
    begins = TEXT_BEGINS.search(text)
    if begins is None:
        return open_quote(text) is not None and not any(b"'" in line or b'"' in line for line in below)
    closing = re.compile(re.escape(begins["quote"]) + rb"(?:\s*[,)\]}]|\s*$|\s+\w+[:=])")
    return closing.search(text, begins.end()) is None and not any(closing.search(line) for line in below)


SYSLOG_WARNING, PINO_WARNING = 4, 40


def own_words(text: bytes) -> tuple[bytes, str] | None:
    """(what the program itself says in a JSON line, its level); *text* itself when it is no JSON, ``None`` for nothing.

    A body whose only key is ``error`` (or that says of itself to be an error) is an answer of the program.
    In a structured log line its level decides, and only the fields that loggers fill are read.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text, ""
    if not isinstance(record, dict):
        return None
    if "OOMKilled" in record:  # the state of a container, as `docker inspect` prints it
        return text, ""
    if set(record) == {"error"}:
        return _encode(_texts(record["error"])), "ERROR"
    if record.get("object") == "error":
        return _encode(_texts(record.get("message"))), "ERROR"
    level = _level(record)
    if level is None:
        return None
    fields = record.get("fields")
    said = [record[key] for key in words.TEXT_KEYS if key in record]
    if isinstance(fields, dict):  # tracing's layout, as TGI's --json-output has it
        said += [fields[key] for key in ("message", "error") if key in fields]
    return _encode(text for value in said for text in _texts(value)), level


def _level(record: Mapping[str, Any]) -> str | None:
    """WARNING or ERROR when a structured line is an alarm, in words or in syslog's or pino's numbers; else ``None``."""
    levels = [record[key] for key in words.LEVEL_KEYS if key in record]
    for name in ("log", "record"):  # ECS, loguru
        nested = record.get(name)
        if isinstance(nested, dict) and "level" in nested:
            levels.append(nested["level"])
    level = levels[0] if levels else ""
    if isinstance(level, dict):
        level = level.get("name", "")
    if isinstance(level, int) and not isinstance(level, bool):
        if level > PINO_WARNING or ("short_message" in record and level < SYSLOG_WARNING):
            return "ERROR"
        return "WARNING" if level in (PINO_WARNING, SYSLOG_WARNING) else None
    word = str(level).lower()
    if word in ("e", "f", "c") or word.startswith(("err", "crit", "fatal", "panic", "dpanic", "alert", "emerg")):
        return "ERROR"
    return "WARNING" if word == "w" or word.startswith("warn") else None


def _encode(texts: Iterator[str]) -> bytes:
    return " ".join(texts).encode("utf-8", "replace")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in ("message", "text", "error", "detail", "type"):
            if key in value:
                yield from _texts(value[key])
