"""Is it the program that speaks? Tells a program's own message from quoted text, advice and source code.

A request logger prints what users write, and users write about out-of-memory errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

CODE = re.compile(
    rb"(?:raise|return|assert|if|elif|else|except|while|for|with|import|from|def|class|throw|case|catch)\b|[})#]|//"
    rb"|(?:logger|logging|log|print|warnings|self|console)\b[.(]"
    rb"|[fr]?[\"'](?![\w ]{1,40}[\"'] ?:)"
    rb"|[\w.\[\]]{1,80} ?=[ =]|[\w.]{1,80}\((?!\()"
)
"""How a line of source code begins; such lines stand in tracebacks, indented by four or more."""

QUOTING = re.compile(
    rb"received request|generated response|(?:generate|embedding)reqinput|<\|user|<\|im_start|messages?[\"']? ?[:=] ?\["
    rb"|[\"']?\b(?:prompts?|content|inputs?|input_text|text|quer(?:y|ies)|question|user|outputs?|answer|completion"
    rb"|response|instruction|transcript|comment|title|subject)[\"']? ?[:=] ?|\bprompts?\b"
    rb"|\"(?:get|post|put|head|patch|delete|options) /?|\bgrep\b|\becho\b|\bcurl\b|^[$>#] "
    rb"|\btest_\w|\b(?:avoid|prevent|faq|e\.g\.|such as|for example|how to|hint:|tip:|in case of)\b"
    rb"|\b(?:if|when) you (?:see|get|hit|encounter|run)|\b(?:may|can|could|might) (?:cause|lead|result|fail)"
    rb"|\bsee (?:the|section|also)\b",
    re.I,
)
"""What stands before text that is not the program's own: request loggers, access logs, shell lines, advice."""

OWN_QUOTE = re.compile(
    rb"(?:err|errs|exc|msg|message|reason|cause|detail|desc|fail|failure|panicked at|panic|stderr|status|event"
    rb"|generation|warmup|backend|\w{0,60}(?:errors?|exception|failed))[\"']?[\s:=(\\]*(?:error)?[\s:=(\\]*$",
    re.I,
)
"""What may open a quote that still is the program's own words."""

APOSTROPHE = re.compile(rb"(?<!\w)'(?=\S)|(?<=\S)'(?!\w)|'$")
"""A single quote that opens or closes; not the one in ``model's``."""

LEAD_BYTES = 4096
"""How much of what stands before a message is looked at."""


def own_voice(text: bytes, indent: int, start: int) -> bool:
    """Whether what begins at *start* of *text* is said by the program, not quoted, advised or source code."""
    if indent >= 4 and CODE.match(text) is not None:
        return False
    if start == 0:
        return True
    lead = text[:start]
    if QUOTING.search(lead[-LEAD_BYTES:]) is not None:
        return False
    opener = open_quote(lead)
    return opener is None or OWN_QUOTE.search(lead[max(0, opener - 80) : opener]) is not None


def open_quote(lead: bytes) -> int | None:
    """Where the quote begins that is still open at the end of *lead*; ``None`` outside of quotes."""
    if lead.count(b'"') % 2:
        return lead.rfind(b'"')
    opened = None
    for match in APOSTROPHE.finditer(lead):
        opened = match.start() if opened is None else None
    return opened


def own_words(text: bytes) -> bytes | None:
    """What the program itself says in a JSON line; *text* itself when it is no JSON, ``None`` when nothing.

    A body whose only key is ``error`` is an answer of the program. In a structured log line its level decides,
    and only the fields that loggers fill are read.
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
        return " ".join(_texts(record["error"])).encode()
    level = next(
        (str(record[key]).lower() for key in ("level", "levelname", "severity", "lvl", "log.level") if key in record),
        "",
    )
    if not level.startswith(("err", "crit", "fatal", "warn")):
        return None
    said = [
        record[key]
        for key in ("logger", "message", "msg", "error", "err", "exception", "exc_info", "event", "stack")
        if key in record
    ]
    return " ".join(text for value in said for text in _texts(value)).encode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in ("logger", "message", "error", "detail", "type"):
            if key in value:
                yield from _texts(value[key])
