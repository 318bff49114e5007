"""Is it the program that speaks? Tells a program's own message from quoted text, advice and source code.

A request logger prints what users write, and users write about out-of-memory errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

CODE = re.compile(
    rb"(?:raise|return|assert|if|elif|else|except|while|for|with|import|from|def|class|throw|case|catch)\b|[})#]|//"
    rb"|(?:logger|logging|log|print|warnings|self|console)\b[.(]"
    rb"|[fr]?[\"'](?![\w ]{1,40}[\"'] ?:)"
    rb"|[\w.\[\]]{1,80} ?=[ =]|[\w.]{1,80}\((?!\()"
)
"""How a line of source code begins; such lines stand in tracebacks, indented by four or more."""

QUOTED = re.compile(
    rb"received request|generated response|(?:generate|embedding)reqinput|<\|user|<\|im_start|messages?[\"']? ?[:=] ?\["
    rb"|[\"']content[\"'] ?:|\"(?:get|post|put|head|patch|delete|options) [^\"]{0,2000}(?:http/\d|$)"
    rb"|^(?:[$>*-]|#+) |\bgrep\b|\becho [\"']|\bcurl\b|\btest_\w+ ?(?:\(|\.\.\.|passed|failed)|^[a-z_]{3,40}=$"
    rb"|\[bugfix\]|\bfix(?:ed|es)? "
    rb"|\b(?:summary|description|annotations?|expr|default|regex|pattern)[\"']?:|\^\.\*",
    re.I,
)
"""What stands before text that is never the program's own: request loggers, access logs, shell lines, lists, rules."""

PERHAPS_QUOTED = re.compile(
    rb"[\"']?\b(?:prompts?|content|inputs?|input_text|text|quer(?:y|ies)|question|user|outputs?|answer|completion|response"
    rb"|instruction|transcript|comment|title|subject)[\"']? ?[:=] ?|\bprompts?\b|\buser (?:asks|says|wrote)\b"
    rb"|\b(?:avoid|prevent|faq|e\.g\.|such as|for example|how to|hint:|tip:|in case of)\b"
    rb"|\b(?:if|when) you (?:see|get|hit|encounter|run)|\b(?:may|can|could|might) (?:cause|lead|result|fail)"
    rb"|\bsee (?:the|section|also)\b",
    re.I,
)
"""The same where it depends: a program that fails on a prompt names the prompt, too."""

FAILING = re.compile(
    rb"\b(?:errors?|err|failed|fails?|failure|exception|fatal|critical|panic\w*|cannot|could not|unable|crash\w*)\b",
    re.I,
)
"""Words with which a program reports its own failure."""

OWN_QUOTE = re.compile(
    rb"(?:err|errs|exc|msg|message|reason|cause|detail|desc|fail|failure|panicked at|panic|stderr|status|event"
    rb"|generation|warmup|backend|\w{0,60}(?:errors?|exception|failed))[\"']?[\s:=(\\]*(?:error)?[\s:=(\\]*$",
    re.I,
)
"""What may open a quote that still is the program's own words."""

QUIET = re.compile(rb"(?:\| ?|- |\[|\b(?:level|lvl|severity)=)\"?(?:info|debug|trace)\b", re.I)
"""A level of other loggers' layouts that is no alarm: loguru, logging's dashes, structlog, logfmt."""

FORGIVEN = re.compile(
    rb"ignoring this choice|decreasing batch size|retrying (?:after|with|in)\b|will (?:be )?retr(?:y|ied)|falling back"
    rb"|handled, ",
    re.I,
)
"""What stands behind a failed allocation that the program got over."""

LEAD_BYTES = 4096
"""How much of what stands before a message is looked at."""


def own_voice(text: bytes, indent: int, start: int, loud: bool) -> bool:
    """Whether what begins at *start* of *text* is the program's; *loud* is a level of failure."""
    if indent >= 4 and CODE.match(text) is not None:
        return False
    if start == 0:
        return True
    lead = text[:start][-LEAD_BYTES:]
    if QUOTED.search(lead) is not None:
        return False
    failing = loud or FAILING.search(lead) is not None
    if not failing and PERHAPS_QUOTED.search(lead) is not None:
        return False
    opener = open_quote(lead)
    if opener is None:
        return True
    before = lead[max(0, opener - 80) : opener]
    return OWN_QUOTE.search(before) is not None or (failing and before.rstrip().endswith(b":"))


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


def opens_quote(text: bytes) -> bool:
    """Whether *text* is a request logger's line whose quoted text goes on in the next line."""
    return QUOTED.search(text[:LEAD_BYTES]) is not None and open_quote(text) is not None


LEVEL_KEYS = ("levelname", "log.level", "severity", "level", "Level", "lvl")
TEXT_KEYS = (
    "logger", "message", "msg", "Message", "error", "err", "error.message", "event", "exception", "exc_info",
    "exc_text", "stack", "stacktrace", "stack_trace", "traceback",
)  # fmt: skip
SYSLOG_WARNING, PINO_WARNING = 4, 40


def own_words(text: bytes) -> bytes | None:
    """What the program itself says in a JSON line; *text* itself when it is no JSON, ``None`` when nothing.

    A body whose only key is ``error`` (or that says of itself to be an error) is an answer of the program.
    In a structured log line its level decides, and only the fields that loggers fill are read.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(record, dict):
        return None
    if "OOMKilled" in record:  # the state of a container, as `docker inspect` prints it
        return text
    if set(record) == {"error"}:
        return _encode(_texts(record["error"]))
    if record.get("object") == "error":
        return _encode(_texts(record.get("message")))
    if not _alarming(record):
        return None
    fields = record.get("fields")
    said = [record[key] for key in TEXT_KEYS if key in record]
    if isinstance(fields, dict):  # tracing's layout, as TGI's --json-output has it
        said += [fields[key] for key in ("message", "error") if key in fields]
    return _encode(text for value in said for text in _texts(value))


def _alarming(record: Mapping[str, Any]) -> bool:
    """Whether a structured line has a level of warning or worse, in words or in the numbers of syslog or pino."""
    nested = record.get("log")
    levels = [record[key] for key in LEVEL_KEYS if key in record]
    if isinstance(nested, dict) and "level" in nested:
        levels.append(nested["level"])
    level = levels[0] if levels else ""
    if isinstance(level, int) and not isinstance(level, bool):
        return level >= PINO_WARNING or ("short_message" in record and level <= SYSLOG_WARNING)
    return str(level).lower().startswith(("err", "crit", "fatal", "warn", "panic", "alert", "emerg"))


def _encode(texts: Iterator[str]) -> bytes:
    return " ".join(texts).encode("utf-8", "replace")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in ("message", "error", "detail", "type"):
            if key in value:
                yield from _texts(value[key])
