"""Log lines for people and machines: a constant message with key=value pairs, in logfmt or JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _pairs(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    pairs: dict[str, Any] = {"ts": when, "level": record.levelname}
    pairs |= {k: v for k, v in vars(record).items() if k not in STANDARD and v not in ("", None)}
    pairs["msg"] = record.getMessage()
    if record.exc_info:
        pairs["traceback"] = formatter.formatException(record.exc_info)
    return pairs


class Logfmt(logging.Formatter):
    """``ts=… level=WARNING source=nvml msg="source failed"``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in _pairs(self, record).items())


class Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return json.dumps(_pairs(self, record), default=str)


def _quoted(text: str) -> str:
    if text and all(c.isprintable() and c not in ' "=\\' for c in text):
        return text
    return json.dumps(text, ensure_ascii=False)


def _not_the_clients_fault(record: logging.LogRecord) -> bool:
    """Whether *record* is worth a line: whoever can connect can send requests that make no sense."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def set_up(level: str, form: str) -> None:
    """Log to standard error from *level* on, as *form* (logfmt or json)."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Logfmt())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(_not_the_clients_fault)
