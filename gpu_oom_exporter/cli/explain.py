"""`explain`: what does this log say happened, why, and what to do first."""

from __future__ import annotations

import argparse
import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from gpu_oom_exporter.analysis.incidents import Classifier, Format
from gpu_oom_exporter.analysis.incidents.causes import cause, own_bytes, size
from gpu_oom_exporter.catalog.categories import CATEGORIES, Severity, runbook
from gpu_oom_exporter.catalog.remedies import NAMES, advise, version_key
from gpu_oom_exporter.cli import OK, PROBLEM, Misuse
from gpu_oom_exporter.model import Incident

CHUNK_BYTES = 1 << 18
LARGE_BYTES = 32 << 20
"""Files from this size on show their progress, on a terminal."""

PLAN_STEPS = 4
"""How many remedies the text shows; JSON and the runbook have all."""

BAR_CELLS, LEGEND_CELLS = 58, 76
BINARY_JOURNAL = b"LPKSHHRH"
"""How a file of systemd-journald begins."""


class Readable(Protocol):
    """What bytes can be read from: a file, or one that is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """At most *size* bytes; none at the end."""
        ...


def run(arguments: argparse.Namespace) -> int:
    """Read every file, print what happened; exit 1 when an incident is an error or worse."""
    hint = vars(arguments)["version_hint"]
    if hint is not None and version_key(hint) is None:
        raise Misuse(f"--version-hint: {hint!r} is no version; write it like 0.11.0")
    names = arguments.file or ["-"]
    if not arguments.file and sys.stdin is not None and sys.stdin.isatty():
        raise Misuse("explain: name a log file, or pipe one in: journalctl -u vllm | gpu-oom-exporter explain -")
    chosen = Format(arguments.format)
    found = [(name, incident) for name in names for incident in read(name, chosen)]
    if arguments.output == "json":
        print(json.dumps({"incidents": [as_json(name, incident, hint or "") for name, incident in found]}))
    else:
        console = Console(highlight=False)
        for name, incident in found:
            console.print(told(name if len(names) > 1 else "", incident, hint or ""))
        if not found:
            console.print("No incident found.")
    worst = {incident.severity for _, incident in found}
    return PROBLEM if worst & {Severity.ERROR, Severity.CRITICAL} else OK


def read(name: str, chosen: Format) -> list[Incident]:
    """The incidents in the file *name*, in the order of its lines; ``-`` is standard input."""
    classifier = Classifier(chosen)
    found: list[Incident] = []
    try:
        with _opened(name) as (file, length), _progress(name, length) as advance:
            for chunk in _text(file):
                found += classifier.feed(chunk)
                advance(len(chunk))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as err:
        raise Misuse(f"{printable(name)}: the compressed file is damaged: {err}") from err
    except OSError as err:
        raise Misuse(f"{printable(name)}: {err.strerror or err}") from err
    found += classifier.close()
    return sorted(found, key=lambda incident: (incident.line, incident.offset))


@contextmanager
def _opened(name: str) -> Iterator[tuple[Readable, int]]:
    """The bytes of *name*, unpacked if it is gzip, and how many there will be (0: not known)."""
    with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
        status = os.fstat(file.fileno())
        unpacked = _unpacked(file)
        yield unpacked, status.st_size if unpacked is file and stat.S_ISREG(status.st_mode) else 0


def _unpacked(file: io.BufferedReader) -> Readable:
    """*file* without its compression, which its first bytes tell."""
    magic = file.peek(8)[:8]
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(file)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        raise Misuse("explain: compressed with zstd; pipe it in: zstdcat FILE | gpu-oom-exporter explain -")
    if magic == BINARY_JOURNAL:
        raise Misuse(
            "explain: a binary journal; pipe it in: journalctl --file FILE -o export | gpu-oom-exporter explain -"
        )
    return file


def _text(file: Readable) -> Iterator[bytes]:
    """The chunks of *file*; UTF-16, which PowerShell writes, becomes UTF-8."""
    chunk = file.read(CHUNK_BYTES)
    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        while chunk:
            yield decoder.decode(chunk).encode("utf-8", "replace")
            chunk = file.read(CHUNK_BYTES)
        return
    chunk = chunk.removeprefix(codecs.BOM_UTF8)
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def printable(text: str) -> str:
    """*text* without what a terminal would take for a command."""
    return "".join(char if char.isprintable() else "?" for char in text)


@contextmanager
def _progress(name: str, length: int) -> Iterator[Any]:
    """A function that takes the bytes of each step; shows them when the file is large and somebody looks."""
    if length < LARGE_BYTES or not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(os.path.basename(name), total=length)
        yield lambda count: progress.advance(task, count)


def as_json(name: str, incident: Incident, hint: str) -> dict[str, Any]:
    """One incident in the fixed keys of the design, with the file and the engine."""
    return {
        "category": incident.category,
        "severity": incident.severity,
        "fields": dict(incident.fields),
        "cause": cause(incident),
        "remedy": advise(incident.category, incident.fields, incident.engine, incident.version or hint),
        "runbook": runbook(incident.category),
        "line": incident.line,
        "file": name,
        "engine": incident.engine or None,
        "version": incident.version or None,
    }


STYLES = {"critical": "bold white on red", "error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def told(name: str, incident: Incident, hint: str) -> RenderableType:
    """One incident for a person with ten seconds: what, the numbers, why, what to do first."""
    version = incident.version or hint
    where = f"{printable(name)} line {incident.line}".strip()
    who = [f"{NAMES.get(incident.engine, incident.engine)} {version}".strip()] if incident.engine else []
    who += [f"PID {incident.fields['pid']}"] if "pid" in incident.fields else []
    who += [f"GPU {incident.fields['gpu']}"] if "gpu" in incident.fields else []
    head = Text.assemble((f" {incident.severity.upper()} ", STYLES[incident.severity]), " ")
    head.append(CATEGORIES[incident.category].title, style="bold")
    parts: list[RenderableType] = [
        head,
        Padding(Text(", ".join((where, *who)), style="dim"), (0, 0, 0, 2), expand=False),
    ]
    picture = draw(incident)
    if picture is not None:
        parts.append(Padding(picture, (0, 0, 0, 2), expand=False))
    parts.append(Padding(Text(printable(cause(incident))), (0, 0, 0, 2), expand=False))
    advice = advise(incident.category, incident.fields, incident.engine, version)
    steps = [line for line in advice if not line.startswith("do not: ")][:PLAN_STEPS]
    plan = Table.grid(padding=(0, 2, 0, 0))
    for count, line in enumerate(steps):
        plan.add_row(Text("then", style="dim") if count else Text("first", style="bold green"), Text(printable(line)))
    for line in [line for line in advice if line.startswith("do not: ")][:1]:
        plan.add_row(Text("not", style="bold red"), Text(line.removeprefix("do not: "), style="dim"))
    plan.add_row(Text("more", style="dim"), Text(runbook(incident.category), style="dim"))
    return Group(*parts, Padding(plan, (0, 0, 0, 2), expand=False), Text(""))


def draw(incident: Incident) -> Text | None:
    """The GPU as one bar: live, unused in the pool, the rest of this process, others, free."""
    fields: Any = incident.fields
    total, free = fields.get("total_bytes"), fields.get("free_bytes")
    if not isinstance(total, int) or not isinstance(free, int) or total <= 0:
        return None
    live, slack = fields.get("allocated_bytes", 0), fields.get("reserved_unallocated_bytes", 0)
    own = own_bytes(fields) or 0
    parts = [
        ("live", live, "█", "red"),
        ("pool, unused", slack, "▓", "yellow"),
        ("rest of the process", max(0, own - live - slack), "▒", "magenta"),
        ("others" if own else "held", max(0, total - free - max(own, live + slack)), "▚", "cyan"),
        ("free", free, "░", "green"),
    ]
    scale = max(total, sum(count for _, count, _, _ in parts))
    bar = Text()
    legend: list[Text] = []
    left = BAR_CELLS
    for label, count, cell, style in parts:
        if not count:
            continue
        cells = min(left, max(1, round(count / scale * BAR_CELLS)))
        left -= cells
        bar.append(cell * cells, style=style)
        legend.append(Text.assemble((cell, style), f" {label} {size(count)}"))
    bar.append(f" {size(total)}")
    if (tried := fields.get("tried_bytes")) is not None:
        legend.append(Text(f"wanted {size(tried)}", style="bold"))
    elif (desired := fields.get("desired_bytes")) is not None:
        legend.append(Text(f"wanted {size(desired)}", style="bold"))
    rows = [bar, Text()]
    for part in legend:
        if len(rows[-1]) + len(part) > LEGEND_CELLS:
            rows.append(Text())
        rows[-1].append_text(part).append("  ")
    return Text("\n").join(rows)
