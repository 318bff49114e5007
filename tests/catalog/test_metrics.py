"""The catalogue of metrics: naming rules, and the budget of series."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from gpu_oom_exporter.catalog.metrics import DROPPED, METRICS, SERIES_PER_GPU, SERIES_PER_HOST, Metric, families
from gpu_oom_exporter.model import (
    Answer,
    Gap,
    HostFacts,
    Incident,
    LogFacts,
    LogOrigin,
    OwnProcess,
    Recorded,
    Report,
    XidCount,
)
from gpu_oom_exporter.publish.exposition import write
from tests.analysis.facts import Thinker, engine, gpu, nvml, on_gpu, process
from tests.conftest import need

ALL = (*METRICS, DROPPED)
UNITS = ("_bytes", "_seconds", "_ratio", "_tokens", "_info", "_total")
UNITLESS = {
    "gpu_oom_attribution_complete",
    "gpu_oom_attribution_gap",
    "gpu_oom_orphaned_contexts",
    "gpu_oom_attribution_fixable_gaps",
    "gpu_oom_gpu_up",
    "gpu_oom_gpu_action_required",
    "gpu_oom_engine_up",
    "gpu_oom_engine_state",
    "gpu_oom_engine_expected_up",
    "gpu_oom_engine_stats_enabled",
    "gpu_oom_engine_requests_running",
    "gpu_oom_engine_requests_waiting",
    "gpu_oom_source_up",
    "gpu_oom_incidents_recent",
    "gpu_oom_engine_deaths_recent",
    "gpu_oom_log_files",
    "gpu_oom_log_files_unreadable",
    "process_open_fds",
    "process_max_fds",
}


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_naming(metric: Metric) -> None:
    """Base units in the name, counters end in _total, at most ten labels, a sentence of help."""
    assert re.fullmatch(r"(gpu_oom|process)_[a-z0-9_]+", metric.name)
    assert metric.name.endswith(UNITS) != (metric.name in UNITLESS)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert len(metric.labels) <= 10
    assert len(set(metric.labels)) == len(metric.labels)
    assert not {"pod", "namespace", "container", "instance", "job", "host"} & set(metric.labels)
    assert metric.help.endswith(".")
    assert metric.series


def test_names_are_unique() -> None:
    """One home per name."""
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)


def full_report(gpus: int, gaps: frozenset[Gap] = frozenset()) -> Report:
    """A report in which as much is present as can be at once: eight commands and an engine on each GPU."""
    think = Thinker()
    for _ in range(3):
        processes, cards = [], []
        for index in range(gpus):
            pids = [1000 * (index + 1) + n for n in range(8)]
            processes += [
                process(pid, f"command-{n}", listening=frozenset({8000 + index}), memory_room_ratio=0.5)
                for n, pid in enumerate(pids)
            ]
            cards.append(
                gpu(
                    *(on_gpu(pid) for pid in pids),
                    index=index,
                    gaps=gaps,
                    recovery_action="none",
                )
            )
        facts = nvml(*cards, processes=tuple(processes), xids=(XidCount("GPU-0", 31, 1),))
        engines = tuple(engine(f"e{n}", port=8000 + n, version="1", max_model_len=1) for n in range(gpus))
        report = think(
            nvml=facts,
            engines=engines,
            host=HostFacts(1, 1, 1, (), OwnProcess(1.0, 1, 1, 1.0, 1, 1), 1, 1),
            logs=log_facts(1.8e9 + 1000.0),
        )
    return report


def log_facts(time: float) -> LogFacts:
    """Logs in which an engine died of a kernel's kill and of its own out-of-memory error."""
    found = Incident("cuda_oom_runtime", "critical", {"gpu": 0}, 1, 0, "vllm")
    recorded = tuple(Recorded(found, LogOrigin(f"file:/{n}", engine="e0"), "1:2:0", time) for n in range(2))
    totals, xids = {"cuda_oom_runtime": 2}, {("0000:00:00", 31): 1}
    return LogFacts(totals, {"cuda_oom_runtime": time}, recorded, 3, 1, 7, {"truncated": 1}, True, xids)


def test_budget() -> None:
    """60 series per GPU and 150 per host, with engines counted at the host, and what is of an engine and a GPU there."""
    found = list(families(full_report(8)))
    of_gpus = [family for family in found if {"gpu", "UUID"} & set(family.labels)]
    per_gpu = sum(len(family.samples) for family in of_gpus)
    rest = sum(len(family.samples) for family in found) - per_gpu
    engines = sum(len(family.samples) for family in found if "engine" in family.labels and family not in of_gpus)
    assert per_gpu / 8 <= SERIES_PER_GPU, per_gpu / 8
    assert rest - engines + engines / 8 * 4 <= SERIES_PER_HOST, "with four engines"


def test_every_metric_is_fed() -> None:
    """No metric of the catalogue is a promise: each has samples in some report."""
    seen = {family.name for family in families(full_report(2))}
    loading = engine(answer=Answer.REFUSED, server=process(5), server_age_seconds=1.0)
    seen |= {family.name for family in families(Thinker()(engines=(loading,)))}
    seen |= {family.name for family in families(full_report(1, frozenset({Gap.VGPU})))}
    elsewhere = {"gpu_oom_source_up", "gpu_oom_source_duration_seconds", "gpu_oom_source_failures_total"}
    elsewhere |= {"gpu_oom_source_last_success_timestamp_seconds"}  # tests/e2e
    kv = {name for name in (m.name for m in METRICS) if "kv_cache" in name or "requests" in name or "preempt" in name}
    assert {metric.name for metric in METRICS} - seen <= elsewhere | kv


def test_promtool_is_content() -> None:
    """`promtool check metrics` finds nothing to say."""
    promtool = shutil.which("promtool")
    need(promtool, "promtool, from Debian's prometheus package")
    page = write(families(full_report(2)))
    done = subprocess.run([str(promtool), "check", "metrics"], input=page, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
