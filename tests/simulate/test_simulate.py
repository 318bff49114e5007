"""The simulated host: byte-compatible pages, the same at the same moment, and a story worth showing."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_oom_exporter.catalog.engines import VLLM
from gpu_oom_exporter.daemon import Daemon, World
from gpu_oom_exporter.model import Cause, EngineState, Holder, Report
from gpu_oom_exporter.simulate.host import BURST_EVERY, FastClock, demo_config, demo_sources
from gpu_oom_exporter.simulate.vllm import VllmPage, template
from gpu_oom_exporter.sources.engines import read_page
from tests.conftest import HERE, ManualClock


def test_the_template_is_the_captured_page() -> None:
    """What the demo serves is derived from a page that a real vLLM served."""
    assert template() == (HERE / "captures" / "vllm" / "0.32-load.prom").read_text()


def test_byte_compatible() -> None:
    """Rendered with the captured values, the page is the captured page; other values change only their lines."""
    captured = template()
    values = {}
    for line in captured.splitlines():
        series, _, value = line.rpartition(" ")
        if series and not line.startswith("#"):
            values[series] = float(value)
    page = VllmPage()
    info = dict(
        re.findall(r'(\w+)="([^"]*)"', next(line for line in values if line.startswith("vllm:cache_config_info")))
    )
    values = {series: value for series, value in values.items() if "cache_config_info" not in series}
    assert page.render(page.captured_model, values, info) == captured.encode()
    name = 'vllm:num_requests_running{engine="0",model_name="tiny-llama"}'
    other = page.render(page.captured_model, {name: 5.0}, {}).decode()
    changed = [new for old, new in zip(captured.split("\n"), other.split("\n"), strict=True) if old != new]
    assert changed == [f"{name} 5.0"]


def test_the_page_is_understood() -> None:
    """Our own reader finds in it what was put in."""
    page = VllmPage()
    name = f'vllm:kv_cache_usage_perc{{engine="0",model_name="{page.captured_model}"}}'
    got = read_page(page.render("other/model", {name: 0.25}, {"num_gpu_blocks": "101", "block_size": "16"}), VLLM)
    assert got.model_name == "other/model"
    assert got.ranks[0].kv_used_ratio == 0.25


async def story(seconds: float, step: float = 5.0) -> list[Report]:
    """Reports of the demo over *seconds* of its time."""
    clock = ManualClock()
    sources, fetch = demo_sources(clock)
    daemon = Daemon(World(sources, clock, fetch), demo_config())
    reports = []
    while clock.now < 1000.0 + seconds:
        for source in sources:
            await daemon.board.read_once(source)
        daemon.tick()
        assert daemon.state.report is not None
        reports.append(daemon.state.report)
        clock.advance(step)
    return reports


async def test_the_story() -> None:
    """Within two hours: bursts that fill the KV cache, a leak that ends an engine, its load, and its return."""
    reports = await story(7200.0, 20.0)
    assert all(health.ok for report in reports for health in report.health.values())
    chat = [report.engines[0] for report in reports]
    code = [report.engines[1] for report in reports]
    assert {engine.state for engine in chat} == {EngineState.READY}
    assert {engine.state for engine in code} == {EngineState.READY, EngineState.LOADING}
    assert max(engine.ranks[0].kv_used_ratio or 0 for engine in chat) == 1.0
    assert min(engine.ranks[0].kv_used_ratio or 0 for engine in chat) < 0.3
    assert max(engine.ranks[0].kv_starved_ratio or 0 for engine in chat) > 0.05
    assert (chat[-1].ranks[0].preemptions_total or 0) > 14
    leak = [next(room.serving_min_bytes for place, room in r.headroom.items() if place.gpu == "1") for r in reports]
    assert min(free for free in leak if free is not None) < 400 * 1024**2
    assert any(free is None for free in leak), "while it loads it does not serve"
    orphaned = [next(o.orphaned for place, o in r.ownership.items() if place.gpu == "3") for r in reports]
    assert orphaned[0] is not None
    assert orphaned[-1] is not None
    assert (orphaned[0][Cause.ENGINE_ORPHAN], orphaned[-1][Cause.ENGINE_ORPHAN] > 70 * 1024**3) == (0, True)
    causes = {c for r in reports for p, o in r.ownership.items() for h in o.holdings if (c := h.cause) and p.gpu != "3"}
    assert causes == set(), "nobody else is accused"
    first = reports[0]
    holders = {place.gpu: owned.held for place, owned in first.ownership.items()}
    assert holders["2"] is not None
    assert holders["2"][Holder.GRAPHICS] > 0
    assert holders["2"][Holder.PROCESS] > 0
    assert all(owned.complete for owned in first.ownership.values())
    assert [[place.gpu for place in engine.places] for engine in first.engines] == [["0"], ["1"]]


async def test_two_runs_are_alike() -> None:
    """Everything is a function of the time since start."""
    one, other = await story(BURST_EVERY, 60.0), await story(BURST_EVERY, 60.0)
    assert [r.headroom for r in one] == [r.headroom for r in other]
    assert [r.engines for r in one] == [r.engines for r in other]


async def test_a_fast_clock(clock: ManualClock) -> None:
    """Ten times the speed: ten seconds pass in one, and sleeping is as much shorter."""
    fast = FastClock(clock, 10.0)
    began = fast.time(), fast.mono()
    clock.advance(1.0)
    assert (fast.time() - began[0], fast.mono() - began[1]) == (10.0, 10.0)


def test_the_demo_needs_no_file_of_this_host() -> None:
    """The template travels with the package."""
    assert Path(template.__code__.co_filename).with_name("vllm_0.32.prom").exists()
