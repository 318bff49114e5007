"""How each inference engine names what we need: one `Dialect` per engine.

To add an engine, add a `Dialect` and a captured page under `tests/captures/`.
The newest name of a field comes first; older ones follow, so old releases keep working.
vLLM's names were read from the sources of 41 releases, 0.2.7 to 0.33.0, and from pages of a running 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache


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
    launches=(
        Launch(("vllm", "serve"), "--port", 8000),
        Launch(("-m", "vllm.entrypoints.openai.api_server"), "--port", 8000),
        Launch(("-m", "vllm.entrypoints.cli.main", "serve"), "--port", 8000),
    ),
)


@dataclass(frozen=True, slots=True)
class Roles:
    """How one engine's processes are recognised: by consecutive words of the command line, or by their title.

    A `server` owns the engine's processes; a `child` serves requests for it; a `worker` holds GPU memory and is
    of no use without one of the others. Titles are compared with argv[0] and with the 15 bytes of comm.
    """

    kind: str
    server_words: tuple[tuple[str, ...], ...] = ()
    child_words: tuple[tuple[str, ...], ...] = ()
    child_titles: tuple[str, ...] = ()
    worker_words: tuple[tuple[str, ...], ...] = ()
    worker_titles: tuple[str, ...] = ()


COMM_BYTES = 15
"""The kernel keeps this much of a process title in comm (TASK_COMM_LEN - 1)."""

ROLES = (
    Roles(
        "vllm",
        server_words=tuple(launch.words for launch in VLLM.launches),
        child_titles=("VLLM::APIServer",),
        worker_titles=("VLLM::EngineCore", "VLLM::Worker", "VLLM::DPCoordinator"),
    ),
    Roles(
        "sglang",
        server_words=(("-m", "sglang.launch_server"), ("sglang", "serve")),
        child_titles=("sglang::http_server", "sglang::tokenizer_worker"),
        worker_titles=("sglang::scheduler", "sglang::detokenizer", "sglang::data_parallel_controller"),
    ),
    Roles(
        "tgi",
        server_words=(("text-generation-launcher",),),
        child_words=(("text-generation-router",),),
        worker_words=(("text-generation-server", "serve"),),
    ),
    # their runners answer requests themselves: as long as they live, somebody can be served
    Roles("ollama", server_words=(("ollama", "serve"),), child_words=(("ollama", "runner"),)),
    Roles("llamacpp", server_words=(("llama-server",),)),
    # Ray's workers belong to an engine on whichever node its driver runs
    Roles("ray", server_words=(("raylet",),), worker_titles=("ray::RayWorkerWrapper", "ray::RayWorkerProc")),
)

ADOPTERS = frozenset(
    {"bash", "catatonit", "conmon", "containerd-shim", "dash", "docker-init", "dumb-init", "fish", "init", "ksh"}
    | {"runsv", "s6-svscan", "sh", "sshd", "su", "sudo", "supervisord", "systemd", "tini", "tmux: server", "zsh"}
)
"""Commands that adopt children whose parent died, or start a server and never a worker."""


@lru_cache(1024)  # asked several times a second about the same few processes
def role_of(comm: str, argv: tuple[str, ...]) -> tuple[str, str] | None:
    """(engine kind, ``server``, ``child`` or ``worker``) of a process, or None when it is no engine's."""
    title = argv[0] if argv else ""
    for roles in ROLES:
        if _titled(comm, title, roles.worker_titles) or _worded(argv, roles.worker_words):
            return roles.kind, "worker"
        if _titled(comm, title, roles.child_titles) or _worded(argv, roles.child_words):
            return roles.kind, "child"
        if _worded(argv, roles.server_words):
            return roles.kind, "server"
    return None


def _titled(comm: str, title: str, titles: tuple[str, ...]) -> bool:
    return any(title.startswith(known) or comm.startswith(known[:COMM_BYTES]) for known in titles)


def _worded(argv: tuple[str, ...], wanted: tuple[tuple[str, ...], ...]) -> bool:
    return any(at >= 0 for at in (words_at(argv, words) for words in wanted))


def words_at(argv: tuple[str, ...], words: tuple[str, ...]) -> int:
    """Where the consecutive *words* stand in *argv*, a path counting as its last part; -1 when they do not."""
    size = len(words)
    for at in range(len(argv) - size + 1):
        if all(argv[at + i] == word or argv[at + i].endswith(f"/{word}") for i, word in enumerate(words)):
            return at
    return -1


DIALECTS = (VLLM,)

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
