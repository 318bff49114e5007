"""Logs of real servers: what happened is found, and nothing on a healthy one."""

from __future__ import annotations

import pytest

from gpu_oom_exporter.model import Incident
from tests.conftest import HERE
from tests.eval_incidents import classify

LOGS = HERE / "captures" / "logs"


def found(name: str) -> list[Incident]:
    return classify((LOGS / f"{name}.log").read_bytes())


@pytest.mark.parametrize(
    "name",
    [
        "vllm-0.32-startup",
        "vllm-0.32-dp2-startup",
        "vllm-0.32-preempt",
        "vllm-0.32-startup-sleepmode-unsupported",
        "llamacpp-normal_np2",
    ],
)
def test_healthy(name: str) -> None:
    """A server that starts, serves and stops is no incident."""
    assert found(name) == []


def test_kv_too_small() -> None:
    """vLLM 0.32 prints the error three times, in two processes: one incident, with its version."""
    (incident,) = found("vllm-0.32-startup-kv-too-small")
    assert (incident.category, incident.engine, incident.version) == ("kv_cache_below_max_model_len", "vllm", "0.32.0")
    assert (incident.fields["max_model_len"], incident.fields["estimated_max_model_len"]) == (4096, 896)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("vllm-0.32-enginecore-killed", "engine_core_died"),
        ("vllm-0.32-worker-killed", "engine_core_died"),
        ("llamacpp-runtime_kv_full_unified", "kv_cache_exhausted"),
        ("llamacpp-startup_bad_alloc", "host_alloc_failure"),
        ("llamacpp-startup_kv_alloc_failed", "host_alloc_failure"),
    ],
)
def test_one_incident(name: str, category: str) -> None:
    """One incident each: a CPU buffer that could not be had is host memory, not the GPU's."""
    assert [category] == [incident.category for incident in found(name)]
