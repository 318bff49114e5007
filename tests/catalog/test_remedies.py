"""Remedies are right for the version in use, in a useful order, and folk remedies are named as such."""

from __future__ import annotations

import pytest

from gpu_oom_exporter.catalog.categories import CATEGORIES
from gpu_oom_exporter.catalog.remedies import ADVICE, NAMES, advise, version_key


def flags(category: str, engine: str = "vllm", version: str = "", **fields: object) -> list[str]:
    return advise(category, fields, engine, version)


def has(lines: list[str], text: str) -> bool:
    """Whether *text* is recommended; what is advised against does not count."""
    return any(text in line for line in lines if not line.startswith("do not: "))


def warned(lines: list[str], text: str) -> bool:
    return any(text in line for line in lines if line.startswith("do not: "))


def test_every_category() -> None:
    """Every category has something to do, and nothing is advised for a category that does not exist."""
    assert set(CATEGORIES) == set(ADVICE)
    for name, rows in ADVICE.items():
        assert any(not row.against for row in rows), name
        assert all(set(row.engines) <= set(NAMES) for row in rows), name
        assert all(version_key(text) for row in rows for text in (row.since, row.before) if text), name


@pytest.mark.parametrize(
    ("category", "flag", "right", "wrong"),
    [
        ("kv_cache_exhausted", "--swap-space N", ["0.5.4", "0.10.2", "0.17.1"], ["0.18.0", "0.32.0"]),
        ("kv_cache_exhausted", "--kv-offloading-size", ["0.14.0", "0.32.0"], ["0.13.0", "0.6.6.post1"]),
        ("kv_cache_preemption", "--preemption-mode", ["0.6.3"], ["0.11.0", "0.32.0"]),
        ("kv_cache_no_blocks", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0", ["0.21.0", "0.33.0"], ["0.19.1"]),
        ("cuda_oom_runtime", "--kv-cache-memory-bytes", ["0.11.0"], ["0.10.2"]),
        ("cuda_oom_runtime", "--enable-chunked-prefill", ["0.6.3"], ["0.11.0"]),
        ("cuda_oom_weights_load", "--quantization awq", ["0.4.2"], ["0.5.3", "0.32.0"]),
        ("kv_cache_below_max_model_len", "--max-model-len auto", ["0.14.1"], ["0.11.0"]),
        ("cuda_oom_sleep_wake", "unset expandable_segments", ["0.11.0", "0.20.0"], ["0.20.1"]),
    ],
)  # fmt: skip
def test_versions(category: str, flag: str, right: list[str], wrong: list[str]) -> None:
    """A flag is offered for the versions that know it and for no other; without a version, with the limits."""
    for version in right:
        assert has(flags(category, version=version), flag), version
    for version in wrong:
        assert not has(flags(category, version=version), flag), version
    unknown = next(line for line in flags(category) if flag in line and not line.startswith("do not"))
    assert "before" in unknown or "newer" in unknown


def test_raise_or_lower() -> None:
    """Utilisation is raised when nothing is left for the KV cache, and lowered when activations do not fit."""
    for category in ("kv_cache_no_blocks", "kv_cache_below_max_model_len"):
        assert has(flags(category), "raise --gpu-memory-utilization")
        assert not has(flags(category), "lower --gpu-memory-utilization")
    for category in (
        "cuda_oom_runtime",
        "cuda_oom_cuda_graph_capture",
        "cuda_oom_sampler_warmup",
        "startup_free_memory_below_target",
    ):
        assert has(flags(category), "lower --gpu-memory-utilization")
        assert not has(flags(category), "raise --gpu-memory-utilization")


def test_order() -> None:
    """A runtime OOM: who else is there, then a smaller share, then batches, then graphs, KV type, weights, TP."""
    order = ["holders", "lower --gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs", "prompt_logprobs",
             "cudagraph_capture_sizes", "--kv-cache-dtype fp8", "quantised checkpoint", "--tensor-parallel-size"]  # fmt: skip
    lines = flags("cuda_oom_runtime", version="0.32.0")
    places = [next(place for place, line in enumerate(lines) if text in line) for text in order]
    assert sorted(places) == places


def test_never_for_serving() -> None:
    """Circulating advice that does not help is named with its reason, last, and never as advice."""
    lines = flags("cuda_oom_runtime", version="0.32.0")
    for text in ("--disable-log-stats", "gradient accumulation", "empty_cache", "expandable_segments", "fuser -k"):
        assert warned(lines, text), text
        assert not has(lines, text), text
    first = next(place for place, line in enumerate(lines) if line.startswith("do not: "))
    assert all(line.startswith("do not: ") for line in lines[first:])
    assert not any(has(flags(category), "--disable-log-stats") for category in CATEGORIES)


def test_training() -> None:
    """Gradient remedies are for training, and fragmentation is what expandable segments are for."""
    lines = advise("cuda_oom_training", {})
    for text in ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "FSDP"):
        assert has(lines, text)
    assert has(flags("cuda_oom_fragmentation"), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert any("--disable-custom-all-reduce" in line for line in flags("cuda_oom_fragmentation"))


def test_hosts_and_containers() -> None:
    """The usual host remedies are there with their limits."""
    shm = advise("shm_exhausted", {})
    assert has(shm, "--shm-size")
    assert has(shm, "--ipc=host")
    assert has(shm, "emptyDir")
    assert has(advise("container_toolkit_missing", {}), "nvidia-ctk runtime configure --runtime=docker")
    assert has(advise("display_holder", {}), "multi-user.target")
    assert has(advise("cuda_oom_weights_load", {}, "vllm"), "--cpu-offload-gb")


def test_engine() -> None:
    """A known engine gets its own flags; an unknown one gets all, each with the engine it is for."""
    sglang = advise("cuda_oom_runtime", {}, "sglang", "0.5.6")
    assert has(sglang, "--mem-fraction-static")
    assert not any("--gpu-memory-utilization" in line for line in sglang)
    unknown = advise("cuda_oom_runtime", {})
    assert any("--mem-fraction-static" in line and "SGLang" in line for line in unknown)
    assert any("--max-num-seqs" in line and "vLLM" in line for line in unknown)


def test_fields() -> None:
    """What the log told is filled in; a row that needs more than it told is left out."""
    assert "--max-model-len 33312" in flags("kv_cache_below_max_model_len", estimated_max_model_len=33312)[0]
    assert "--max-model-len {" not in " ".join(flags("kv_cache_below_max_model_len"))
    assert has(advise("gpu_ecc_error", {"pci": "0000:c1:00"}), "-i 0000:c1:00")
    assert has(advise("gpu_ecc_error", {}), "-i GPU-UUID")
    assert has(advise("worker_sigkilled", {}), "docker inspect -f '{{.State.OOMKilled}}'")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("0.6.6.post1", (0, 6, 6)),
        ("v0.32", (0, 32, 0)),
        ("0.11.1rc2", (0, 11, 1)),
        ("0.2x", (0, 2, 0)),
        ("n/a", None),
        ("b4700", None),
    ],
)
def test_version_key(text: str, key: tuple[int, ...] | None) -> None:
    """Versions as projects write them."""
    assert key == version_key(text)
