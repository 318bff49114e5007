"""The page writer, held equal to prometheus_client's byte for byte."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.utils import floatToGoString

from gpu_oom_exporter.model import Family, Holder, Ownership, Place, Report
from gpu_oom_exporter.publish.exposition import Page, number, write

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
LABELS = st.lists(st.sampled_from(["gpu", "UUID", "engine", "GPU_I_ID", "comm", "rank"]), unique=True, max_size=4)
VALUES = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**15), 10**15).map(float)


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    found = []
    for name in draw(st.lists(st.sampled_from(["a_bytes", "b_ratio", "c_things"]), unique=True)):
        kind = draw(st.sampled_from(["gauge", "counter"]))
        labels = tuple(draw(LABELS))
        rows = draw(st.lists(st.tuples(*[TEXT] * len(labels)), unique=True, max_size=4))
        samples = tuple((tuple(row), draw(VALUES)) for row in rows)
        full = f"{name}_total" if kind == "counter" else name
        found.append(Family(full, kind, draw(TEXT), labels, samples))
    return found


def reference(found: list[Family], openmetrics: bool) -> bytes:
    """The same page by prometheus_client."""

    class Collector:
        def collect(self) -> Iterator[Metric]:
            for family in found:
                make = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
                metric = make(
                    family.name.removesuffix("_total") if family.type == "counter" else family.name, family.help
                )
                for values, value in family.samples:
                    labels = {k: v for k, v in zip(family.labels, values, strict=True) if v}
                    metric.add_sample(family.name, labels, value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type]
    return generate_openmetrics(registry) if openmetrics else generate_latest(registry)


@given(families(), st.booleans())
def test_equal_to_prometheus_client(found: list[Family], openmetrics: bool) -> None:
    """Any families, any labels, any values, in both formats."""
    assert write(found, openmetrics) == reference(found, openmetrics)


@given(st.floats() | st.integers(-(2**63), 2**63).map(float))
def test_numbers(value: float) -> None:
    """Numbers are written as Go and prometheus_client write them."""
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("value", [0, 1, 999999, 1000000, 85520809984, 2**53, -1, -85520809984])
def test_whole_numbers(value: int) -> None:
    """Integers are numbers too."""
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]
    assert math.isclose(float(number(value)), value)


def report(places: int = 1) -> Report:
    owned = {Place(str(n), f"GPU-{n}"): Ownership(held={Holder.ENGINE: 5}) for n in range(places)}
    return Report(time=1.0, ownership=owned)


def test_rendered_once_and_shared() -> None:
    """One report, one format: one rendering, however many ask."""
    page, one = Page(1000), report()
    assert page.body(one, False, False) is page.body(one, False, False)
    assert page.body(one, True, True) is page.body(one, True, True)
    assert gzip.decompress(page.body(one, True, True)) == page.body(one, True, False)
    assert page.body(one, True, False).endswith(b"# EOF\n")
    before = page.body(one, False, False)
    assert page.body(report(), False, False) is not before


def test_hard_cap_drops_and_counts() -> None:
    """More series than the limit are left off and counted; the exporter's own stay."""
    page = Page(100)
    body = page.body(report(200), False, False).decode()
    series = [line for line in body.splitlines() if not line.startswith("#")]
    assert len(series) == 101, "the limit and the counter of what was dropped"
    assert any(line.startswith("gpu_oom_build_info") for line in series)
    dropped = float(series[-1].split()[-1])
    assert dropped > 0
    page.body(report(200), False, False)
    assert page.dropped == 2 * dropped, "a counter goes up"
    assert "gpu_oom_series_dropped_total 0.0" in Page(5000).body(report(), False, False).decode()


def test_label_memory_is_bounded() -> None:
    """Series that come and go for weeks leave nothing behind."""
    page = Page(100)
    for start in range(0, 3000, 30):
        owned = {Place(str(n), f"GPU-{n}"): Ownership(held={Holder.ENGINE: 5}) for n in range(start, start + 30)}
        page.body(Report(time=1.0, ownership=owned), False, False)
    assert sum(map(len, page._spelled.values())) < 400
