"""The page writer: a report as Prometheus text 0.0.4 or OpenMetrics 1.0.

Our own because a page must cost at most 2 ms of CPU per 1,000 series, where prometheus_client takes 10 ms.
A test holds it equal to prometheus_client's output, byte for byte.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_oom_exporter.catalog.metrics import DROPPED, families
from gpu_oom_exporter.model import Family, Report

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


Spelled = dict[tuple[str, ...], dict[tuple[str, ...], str]]
"""Label names → label values → ``{a="b"}``: most series of a page were on the page before."""


def write(found: Iterable[Family], openmetrics: bool = False, spelled: Spelled | None = None) -> bytes:
    """The page of *found*, in the text format or in OpenMetrics; *spelled* remembers label sets between pages."""
    spelled = {} if spelled is None else spelled
    lines: list[str] = []
    for family in found:
        full = name = family.name
        if openmetrics and family.type == "counter":
            name = name.removesuffix("_total")
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        if openmetrics:
            help_text = help_text.replace('"', '\\"')
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {family.type}\n")
        known = spelled.setdefault(family.labels, {})
        for labels, value in family.samples:
            pairs = known.get(labels)
            if pairs is None:
                pairs = known[labels] = _pairs(family.labels, labels)
            lines.append(f"{full}{pairs} {number(value)}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Labels in alphabetical order, as prometheus_client sorts them; an empty value is no label."""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(zip(names, values, strict=True)) if value)
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    """*value* as Go prints a float, which is how Prometheus' clients write it."""
    value = float(value)
    if -math.inf < value < 1e6:
        return repr(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    text = repr(value)
    if "e" in text:
        return text
    dot = text.index(".")  # Go switches to exponents at 1e+06, Python at 1e+16
    mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{dot - 1:0>2}"


@dataclass(slots=True)
class Page:
    """The pages of one report, each rendered when first asked for and then shared.

    *limit* is the most series a page has; what it leaves off is counted over the life of the daemon.
    """

    limit: int
    dropped: int = 0
    report: Report | None = None
    _families: tuple[Family, ...] = ()
    _bodies: dict[tuple[bool, bool], bytes] = field(default_factory=dict)
    _spelled: Spelled = field(default_factory=dict)

    def body(self, report: Report, openmetrics: bool, compressed: bool) -> bytes:
        """The page of *report* in one format, gzip'd when *compressed*."""
        if report is not self.report:
            self.report = report
            self._bodies.clear()
            self._families = self._within_limit(families(report))
            if sum(map(len, self._spelled.values())) > 2 * self.limit:
                self._spelled.clear()  # labels of what is gone must not pile up
        key = (openmetrics, compressed)
        if key not in self._bodies:
            if compressed:
                # level 1: the page is text of few words, higher levels cost CPU for a few percent
                self._bodies[key] = gzip.compress(self.body(report, openmetrics, False), compresslevel=1, mtime=0)
            else:
                self._bodies[key] = write(self._families, openmetrics, self._spelled)
        return self._bodies[key]

    def _within_limit(self, found: tuple[Family, ...]) -> tuple[Family, ...]:
        kept = []
        room = self.limit
        # the exporter's own families come last in the catalogue and must not be the ones to go
        for family in sorted(
            found, key=lambda f: not f.name.startswith(("gpu_oom_source", "gpu_oom_build", "gpu_oom_tick", "process_"))
        ):
            if len(family.samples) > room:
                self.dropped += len(family.samples) - room
                family = Family(family.name, family.type, family.help, family.labels, family.samples[:room])
            room -= len(family.samples)
            if family.samples:
                kept.append(family)
        order = {family.name: at for at, family in enumerate(found)}
        kept.sort(key=lambda family: order[family.name])
        dropped = Family(DROPPED.name, DROPPED.type, DROPPED.help, (), (((), float(self.dropped)),))
        return (*kept, dropped)
