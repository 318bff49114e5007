"""How each inference engine names what we need: one `Dialect` per engine.

To add an engine, add a `Dialect` and a captured page under `tests/captures/`.
The newest name of a field comes first; older ones follow, so old releases keep working.
vLLM's names were read from the sources of 41 releases, 0.2.7 to 0.33.0, and from pages of a running 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Field:
    """Where a page tells one value: its names, newest first, and the labels its series must have."""

    names: tuple[str, ...]
    only: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line that starts an API server: consecutive words (a word may be a path), port flag, default."""

    words: tuple[str, ...]
    port_flag: str
    default_port: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's page, processes and extra addresses.

    `prefix` begins every family of the engine. `info` is the family whose labels describe the KV pool.
    `titles` are process titles of workers, compared with the first 15 bytes that the kernel keeps.
    `asleep` are (label, value) pairs of the `sleep` family that mean no weights or KV on the GPU.
    `grows` says whether the engine's allocator takes memory outside its pool while it serves.
    """

    name: str
    prefix: str
    rank_label: str
    fields: dict[str, Field]
    info: str = ""
    sleep: str = ""
    asleep: tuple[tuple[str, str], ...] = ()
    v0_marks: tuple[str, ...] = ()
    version_path: str = ""
    models_path: str = ""
    titles: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    metrics_path: str = "/metrics"
    grows: bool = True
    unsupported: frozenset[str] = field(default_factory=frozenset)


FIELDS = ("kv_used_ratio", "running", "waiting", "waiting_for_capacity", "preemptions_total")
"""What a dialect maps in `fields`, or lists in `unsupported` when its engine does not tell."""

VLLM = Dialect(
    name="vllm",
    prefix="vllm:",
    rank_label="engine",
    fields={
        # 0.9.2..0.10.2 export both names with the same value: the first one found is taken, never the sum
        "kv_used_ratio": Field(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        "running": Field(("vllm:num_requests_running",)),
        "waiting": Field(("vllm:num_requests_waiting",)),
        # since 0.20.0; "deferred" waits for a LoRA slot or a KV transfer and says nothing about memory
        "waiting_for_capacity": Field(("vllm:num_requests_waiting_by_reason",), only=(("reason", "capacity"),)),
        "preemptions_total": Field(("vllm:num_preemptions_total",)),
    },
    info="vllm:cache_config_info",
    sleep="vllm:engine_sleep_state",
    asleep=(("sleep_state", "weights_offloaded"), ("sleep_state", "discard_all")),
    # only the V0 engine (gone in 0.11.0) swaps to CPU; it has no null block
    v0_marks=("vllm:cpu_cache_usage_perc", "vllm:num_requests_swapped"),
    version_path="/version",
    models_path="/v1/models",
    titles=("VLLM::EngineCore", "VLLM::Worker", "VLLM::APIServer", "VLLM::DPCoordinator"),
    launches=(
        Launch(("vllm", "serve"), "--port", 8000),
        Launch(("-m", "vllm.entrypoints.openai.api_server"), "--port", 8000),
        Launch(("-m", "vllm.entrypoints.cli.main", "serve"), "--port", 8000),
    ),
)

DIALECTS = (VLLM,)

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
