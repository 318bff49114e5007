"""What helps after an incident: per category an ordered list, first what is safe and likely.

A row is right for some engines and some of their versions. vLLM's flags by release: the project's `arg_utils.py` at
the release tags; PyTorch's allocator settings: its CUDA notes and pytorch/pytorch#183387, #147851; conflicts of
expandable segments: vllm-project/vllm#40812, #42609; what `--disable-log-stats` does: `v1/metrics/loggers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do, a command where there is one, or (*against*) one that circulates and does not help here.

    Right for *engines* (any when empty), from version *since* on and before version *before*, and where *when* is
    given, only if that field of the incident has one of those values.
    ``{pid}``, ``{pci}`` and other fields of the incident are filled in where they are known.
    """

    do: str
    caveat: str = ""
    engines: tuple[str, ...] = ()
    since: str = ""
    before: str = ""
    against: bool = False
    when: tuple[str, frozenset[Any]] | None = None

    @property
    def versions(self) -> str:
        """For which versions, in words; empty for all."""
        if self.since and self.before:
            return f"{self.since} to before {self.before}"
        return f"{self.since} and newer" if self.since else f"before {self.before}" if self.before else ""


NAMES = {
    "vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "llamacpp": "llama.cpp", "ollama": "Ollama", "trtllm": "TensorRT-LLM",
    "lmdeploy": "LMDeploy", "lmcache": "LMCache", "ray": "Ray",
}  # fmt: skip
V, S, T, L, O = ("vllm",), ("sglang",), ("tgi",), ("llamacpp",), ("ollama",)  # noqa: E741 - one letter per engine

HOLDERS = Remedy("gpu-oom-exporter holders", "beside an orphan or a co-tenant every other remedy is guesswork")
RELEASE = Remedy(
    "gpu-oom-exporter release PID", "for each orphan that holders names; it prints its plan and acts only with --yes"
)
LOWER = Remedy(
    "lower --gpu-memory-utilization by 0.03 to 0.05",
    "a share of the whole card and of this instance alone; the default is 0.9, and 0.92 in releases from about 0.25",
    V,
)
RAISE = Remedy(
    "raise --gpu-memory-utilization, to at most about 0.95",
    "right here, wrong for an out-of-memory error while serving; the default is 0.9, and 0.92 in releases from about 0.25",
    V,
)
SHORTER = Remedy("lower --max-model-len", "the cheapest remedy when nobody needs the full context", V)
SHORTER_AUTO = Remedy(
    "--max-model-len auto", "takes the longest context that fits; some releases spell it -1", V, "0.14"
)
FEWER_SEQS = Remedy(
    "lower --max-num-seqs", "it sizes sampler, graphs and activations; large cards default to up to 1024", V
)
FEWER_TOKENS = Remedy(
    "lower --max-num-batched-tokens", "the main lever on activations; it must still cover one multimodal item", V
)
NO_LOGPROBS = Remedy(
    "limit multimodal items (--limit-mm-per-prompt) and turn prompt_logprobs off",
    "both allocate outside of what profiling saw",
    V,
)
FEWER_GRAPHS = Remedy(
    "fewer cudagraph_capture_sizes in --compilation-config",
    "keeps most of the speed that --enforce-eager gives up",
    V,
    "0.8",
)
EAGER = Remedy("--enforce-eager", "last resort: frees the graph pools, costs decode latency", V)
NO_GRAPH_ESTIMATE = Remedy(
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",
    "the estimate of graph memory is too high for many capture sizes; a wrong guess fails later, at capture",
    V,
    "0.21",
)
KV_FP8 = Remedy(
    "--kv-cache-dtype fp8",
    "about twice the tokens; needs sm89 or newer, scales for accuracy, and an attention backend that takes it",
    V,
)
QUANTISED = Remedy(
    "use a quantised checkpoint (AWQ, GPTQ or FP8) of the model",
    "the checkpoint must exist: the flag alone quantises nothing",
    V + S + T,
)
FP8_ONLINE = Remedy(
    "--quantization fp8", "quantises weights while loading; sm89 or newer (weight-only before)", V, "0.4"
)
AWQ_OLD = Remedy("--quantization awq, with an AWQ checkpoint", "", V, before="0.5.3")
AWQ_FLAG = Remedy(
    "--quantization awq",
    "leave it out: the checkpoint is recognised, and an explicit awq forces the slow kernel",
    V,
    "0.5.3",
    against=True,
)
TP = Remedy(
    "--tensor-parallel-size N",
    "must divide the attention heads; needs /dev/shm; KV per GPU shrinks only while N <= KV heads",
    V,
)
CPU_OFFLOAD = Remedy(
    "--cpu-offload-gb N", "weights in pinned host memory: slow, takes RAM, and conflicts with AWQ-Marlin repacking", V
)
KV_BYTES = Remedy(
    "--kv-cache-memory-bytes N",
    "pins the pool whatever else is on the card; it overrules --gpu-memory-utilization, and too much fails later",
    V,
    "0.11",
)
CHUNKED = Remedy(
    "--enable-chunked-prefill", "bounds the activations of a prefill; V1 has it on by default", V, before="0.8"
)
CHUNKED_ON = Remedy("--no-enable-chunked-prefill", "turning it off raises the activation peak", V, "0.8", against=True)
SWAP = Remedy("--swap-space N", "V0 engine only: V1 accepts it and does nothing", V, before="0.18")
SWAP_GONE = Remedy("--swap-space", "removed in 0.18: the start fails with an unknown argument", V, "0.18", against=True)
KV_OFFLOAD = Remedy(
    "--kv-offloading-size GIB --kv-offloading-backend native",
    "in host RAM, in total over the tensor-parallel ranks",
    V,
    "0.14",
)
PREEMPT_MODE = Remedy("--preemption-mode recompute", "V0 engine only; V1 always recomputes", V, before="0.11")
EXPANDABLE = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "cures fragmentation only; set the old name or both, since torch 2.9.1 ignores PYTORCH_ALLOC_CONF; with tensor parallelism and "
    "CUDA graphs add --disable-custom-all-reduce; not with sleep mode before vLLM 0.20.1; breaks CUDA IPC",
)
EXPANDABLE_NOT = Remedy(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "the hint in the message is printed always; it helps only against fragmentation, not a full GPU",
    against=True,
)
SPLIT_NOT = Remedy(
    "max_split_size_mb",
    "from before expandable segments; together with them it does nothing, alone it may fragment more",
    against=True,
)
STATS_NOT = Remedy("--disable-log-stats", "saves no memory and takes all vllm:* metrics away", V, against=True)
EMPTY_NOT = Remedy(
    "torch.cuda.empty_cache()",
    "gives back unused blocks of its own process only, slows it, and cures no leak",
    against=True,
)
GRADIENT_NOT = Remedy(
    "gradient accumulation or checkpointing", "is for training; inference keeps no gradients", against=True
)
FUSER_NOT = Remedy(
    "fuser -k /dev/nvidia*",
    "ends everything that has any GPU open: other tenants, the display, DCGM, the Fabric Manager",
    against=True,
)
HEADLESS = Remedy(
    "sudo systemctl set-default multi-user.target, then reboot", "on a desktop: a display holds 0.1 to 2 GiB"
)
PLAN = Remedy("a GPU with more memory, or a smaller model", "when none of the above may be changed")

SGLANG_LOWER = Remedy(
    "lower --mem-fraction-static by 0.05",
    "right for errors in forward and graph capture; raise it for 'Not enough memory'",
    S,
)
SGLANG_RAISE = Remedy(
    "raise --mem-fraction-static",
    "both directions can be wrong at once: then only a larger GPU, quantisation or --tp helps",
    S,
)
SGLANG_GRAPHS = Remedy("lower --cuda-graph-max-bs", "fewer and smaller graphs", S)
SGLANG_CHUNK = Remedy("lower --chunked-prefill-size", "bounds the activations of a prefill", S)
SGLANG_RUNNING = Remedy("lower --max-running-requests", "fewer requests share the pool", S)
SGLANG_CONSERVATIVE = Remedy(
    "--schedule-conservativeness 1.3",
    "admits fewer requests, so that fewer are retracted; about one retract a minute is fine",
    S,
)
SGLANG_TP = Remedy("--tp N", "must divide the attention heads", S)
TGI_PREFILL = Remedy("lower --max-batch-prefill-tokens", "the warm-up runs one batch of this size", T)
TGI_TOTAL = Remedy("lower --max-total-tokens and --max-batch-total-tokens", "", T)
TGI_GRAPHS = Remedy("--cuda-graphs 0", "frees the graph pools, costs decode latency", T)
TGI_FRACTION = Remedy("lower --cuda-memory-fraction", "when others use the GPU as well", T)
LLAMA_LAYERS = Remedy("lower -ngl", "fewer layers on the GPU; automatic fitting (--fit) does it in 2026 builds", L)
LLAMA_CONTEXT = Remedy("lower -c (context) and -np (slots)", "the KV buffer is taken whole at start-up", L)
LLAMA_BATCH = Remedy("lower -ub", "the compute buffer grows with the micro-batch", L)
LLAMA_KV = Remedy("-ctk q8_0 -ctv q8_0 -fa on", "half the KV cache; V needs flash attention", L)
OLLAMA_CONTEXT = Remedy("lower num_ctx (OLLAMA_CONTEXT_LENGTH)", "", O)
OLLAMA_OVERHEAD = Remedy("OLLAMA_GPU_OVERHEAD=BYTES", "keeps that much of each GPU free", O)
OLLAMA_LAYERS = Remedy("lower num_gpu", "fewer layers on the GPU", O)
OLLAMA_KV = Remedy("OLLAMA_KV_CACHE_TYPE=q8_0 with OLLAMA_FLASH_ATTENTION=1", "half the KV cache", O)
TRT_FRACTION = Remedy(
    "lower kv_cache_config.free_gpu_memory_fraction, max_batch_size or max_num_tokens", "", ("trtllm",)
)
LMDEPLOY_CACHE = Remedy(
    "lower --cache-max-entry-count",
    "a share of free memory; raise it when only the KV cache is too small",
    ("lmdeploy",),
)

_NOT_FOR_SERVING = (EXPANDABLE_NOT, STATS_NOT, EMPTY_NOT, GRADIENT_NOT, FUSER_NOT)
_RUNTIME = (
    HOLDERS, RELEASE, LOWER, SGLANG_LOWER, FEWER_TOKENS, CHUNKED, CHUNKED_ON, FEWER_SEQS, SGLANG_CHUNK, SGLANG_RUNNING, NO_LOGPROBS, FEWER_GRAPHS,
    SGLANG_GRAPHS, KV_BYTES, KV_FP8, QUANTISED, AWQ_OLD, AWQ_FLAG, TP, SGLANG_TP, EAGER, TGI_PREFILL, TGI_FRACTION,
    LLAMA_LAYERS, LLAMA_BATCH, OLLAMA_OVERHEAD, OLLAMA_CONTEXT, OLLAMA_LAYERS, TRT_FRACTION, HEADLESS,
)  # fmt: skip
_GENERIC = (*_RUNTIME, *_NOT_FOR_SERVING)

KERNEL_LOG = Remedy(
    "journalctl -k --since '10 min ago' | grep -i -E 'oom|killed process'", "the kernel names victim, cgroup and limit"
)
MORE_RAM = Remedy(
    "raise the container's memory limit (docker --memory, resources.limits.memory)",
    "page cache of weights and /dev/shm count against it",
)
LESS_RAM = Remedy(
    "lower what the engine keeps in RAM: --cpu-offload-gb, --kv-offloading-size, --swap-space (before 0.18)", "", V
)
SAFETENSORS = Remedy("load safetensors rather than .bin files", "loading .bin needs the weights twice in RAM")
RAM = Remedy("more RAM or swap, or fewer programs on the host", "swap lets the load finish; serving from it is slow")
SHM_SIZE = Remedy(
    "docker run --shm-size=16g, in Compose: shm_size: 16gb", "the default is 64 MiB; ignored together with ipc: host"
)
SHM_IPC = Remedy("docker run --ipc=host", "no isolation, and stale nccl-* and psm_* segments stay on the host")
SHM_K8S = Remedy("Kubernetes: an emptyDir with medium: Memory at /dev/shm", "counts against the pod's memory limit")
SHM_LOOK = Remedy("df -h /dev/shm; ls -l /dev/shm", "in the container; segments of dead processes may be deleted")
DRIVER_LOG = Remedy("dmesg -T | grep -i -E 'NVRM|Xid'", "the first Xid is the cause, later ones follow from it")
CORDON = Remedy(
    "drain the node, then: nvidia-smi --gpu-reset -i {gpu_id}",
    "needs root and no user of the GPU; on NVSwitch systems it disturbs the peers",
)
DIAGNOSE = Remedy("dcgmi diag -r 3", "on the drained GPU")
UPDATE_ENGINE = Remedy("update engine and driver", "faults of kernels are fixed release by release")
BLOCKING = Remedy("CUDA_LAUNCH_BLOCKING=1 once, to find the kernel", "for diagnosis only: slow")
TOOLKIT = Remedy(
    "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    "rootless Docker and Docker Desktop read another daemon.json; Docker from snap does not work with it",
)
CONTAINERD = Remedy(
    "sudo nvidia-ctk runtime configure --runtime=containerd && sudo systemctl restart containerd",
    "on Kubernetes nodes with containerd; the GPU operator does it itself",
)
LOGS = Remedy("look at the engine's own log around this moment", "the cause is there or in the kernel's log")
SIGNATURE_LOG = Remedy(
    "read the lines above the first EngineDeadError, and every worker's log", "the API server only repeats"
)
READY = Remedy(
    "let the proxy wait for /health before it sends traffic",
    "vLLM opens its port after loading; SGLang's /health can answer while its scheduler is dead: /health_generate",
    V + S,
)

ADVICE: Mapping[str, tuple[Remedy, ...]] = {
    "cuda_oom_weights_load": (
        HOLDERS, RELEASE, QUANTISED, FP8_ONLINE, AWQ_OLD, AWQ_FLAG, TP, SGLANG_TP, CPU_OFFLOAD, LLAMA_LAYERS, OLLAMA_LAYERS, OLLAMA_OVERHEAD,
        TRT_FRACTION, HEADLESS, PLAN, Remedy("lower --gpu-memory-utilization", "it bounds the KV cache, not the weights", V, against=True), *_NOT_FOR_SERVING,
    ),
    "cuda_oom_profiling": (
        HOLDERS, RELEASE, FEWER_TOKENS, FEWER_SEQS, CHUNKED, CHUNKED_ON, SHORTER, NO_LOGPROBS, SGLANG_CHUNK, TGI_PREFILL, LLAMA_BATCH, LLAMA_CONTEXT,
        OLLAMA_CONTEXT, TRT_FRACTION, QUANTISED, TP, SGLANG_TP, CPU_OFFLOAD, HEADLESS, *_NOT_FOR_SERVING,
    ),
    "cuda_oom_kv_alloc": (
        HOLDERS, RELEASE, LOWER, KV_BYTES, SHORTER, SGLANG_LOWER, LLAMA_CONTEXT, LLAMA_KV, OLLAMA_CONTEXT, OLLAMA_KV, KV_FP8, TRT_FRACTION, LMDEPLOY_CACHE, *_NOT_FOR_SERVING,
    ),
    "cuda_oom_cuda_graph_capture": (
        HOLDERS, RELEASE, LOWER, FEWER_GRAPHS, FEWER_SEQS, SGLANG_GRAPHS, SGLANG_LOWER, TGI_GRAPHS, KV_BYTES, EAGER, *_NOT_FOR_SERVING,
    ),
    "cuda_oom_sampler_warmup": (
        FEWER_SEQS, HOLDERS, RELEASE, LOWER, KV_BYTES, Remedy("--enforce-eager", "frees graph memory, which the sampler does not use", V, against=True), *_NOT_FOR_SERVING,
    ),
    "cuda_oom_runtime": _GENERIC,
    "cuda_oom_generic": _GENERIC,
    "cuda_oom_fragmentation": (
        EXPANDABLE, HOLDERS, LOWER, SGLANG_LOWER, FEWER_TOKENS, Remedy("restart the engine in a quiet hour", "empties the pool; how fast it fragments again tells the rest"),
        SPLIT_NOT, STATS_NOT, EMPTY_NOT, GRADIENT_NOT, FUSER_NOT,
    ),
    "cuda_oom_co_tenant": (
        HOLDERS, RELEASE, Remedy("move one of the two programs to another GPU (CUDA_VISIBLE_DEVICES, one GPU per container)"), KV_BYTES, LOWER, SGLANG_LOWER, TGI_FRACTION,
        HEADLESS, *_NOT_FOR_SERVING,
    ),
    "cuda_oom_fraction_limit": (
        Remedy("raise the fraction: torch.cuda.set_per_process_memory_fraction", "the GPU has room; somebody set this limit"), Remedy("raise --cuda-memory-fraction", "", T), HOLDERS, *_NOT_FOR_SERVING,
    ),
    "cuda_oom_sleep_wake": (
        HOLDERS, RELEASE, Remedy("wake the engine before other engines take the GPU, and never put it to sleep with requests in flight", "", V),
        Remedy("wake_up with tags: weights first, then kv_cache", "needs the peak only once", V, "0.8"), KV_BYTES,
        Remedy("unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF", "not compatible with the sleep allocator", V, before="0.20.1"),
        Remedy("unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF", "torch_memory_saver gives nothing back with it", S), FUSER_NOT,
    ),
    "cuda_oom_library": (
        HOLDERS, RELEASE, LOWER, SGLANG_LOWER, Remedy("leave 1 to 2 GiB outside of the pool for cuBLAS workspaces and NCCL buffers"),
        Remedy("check that NVML works inside the container: nvidia-smi", "the NVML_SUCCESS assertion also comes from MIG, a wrong CUDA_VISIBLE_DEVICES or a missing library"), *_NOT_FOR_SERVING,
    ),
    "cuda_oom_training": (
        HOLDERS, RELEASE, Remedy("lower per_device_train_batch_size"), Remedy("raise gradient_accumulation_steps by the same factor", "keeps the effective batch"),
        Remedy("gradient_checkpointing=True", "about a third more time for much less activation memory"), Remedy("bf16=True, and a shorter sequence length"),
        Remedy("shard optimizer and parameters: FSDP or DeepSpeed ZeRO-2/3", "needs more than one GPU, or CPU offload"), Remedy("an 8-bit optimizer, or LoRA/QLoRA"), EXPANDABLE,
        EMPTY_NOT, FUSER_NOT,
    ),
    "kv_cache_no_blocks": (
        HOLDERS, RAISE, NO_GRAPH_ESTIMATE, FEWER_TOKENS, FEWER_SEQS, FEWER_GRAPHS, QUANTISED, FP8_ONLINE, AWQ_OLD, AWQ_FLAG, KV_FP8, TP, EAGER, CPU_OFFLOAD, LMDEPLOY_CACHE, HEADLESS,
        EXPANDABLE_NOT, STATS_NOT, GRADIENT_NOT,
    ),
    "kv_cache_below_max_model_len": (
        Remedy("--max-model-len {estimated_max_model_len}", "the longest that this start could have served", V), SHORTER, SHORTER_AUTO, HOLDERS, RAISE, NO_GRAPH_ESTIMATE, KV_FP8,
        FEWER_TOKENS, FEWER_SEQS, QUANTISED, TP, FEWER_GRAPHS, EAGER, KV_OFFLOAD, EXPANDABLE_NOT, STATS_NOT, GRADIENT_NOT,
    ),
    "kv_cache_exhausted": (
        FEWER_SEQS, SGLANG_RUNNING, SGLANG_CONSERVATIVE,  Remedy("raise -c, or give fewer slots (-np)", "the slots share one cache", L), LLAMA_KV, RAISE, SGLANG_RAISE, SHORTER, KV_FP8, SWAP,
        SWAP_GONE, KV_OFFLOAD, TP, SGLANG_TP, LMDEPLOY_CACHE, STATS_NOT,
    ),
    "kv_cache_preemption": (
        Remedy("nothing, while latency is good enough", "a full KV cache is normal; watch gpu_oom_kv_cache_starved_ratio"), FEWER_SEQS, RAISE, KV_FP8, SGLANG_CONSERVATIVE, SGLANG_RAISE, SGLANG_RUNNING,
        SWAP, SWAP_GONE, KV_OFFLOAD, PREEMPT_MODE, CHUNKED, TP, SGLANG_TP,  LLAMA_KV, STATS_NOT,
    ),
    "startup_free_memory_below_target": (
        HOLDERS, RELEASE, Remedy("--gpu-memory-utilization {fitting_utilization}", "the share that is free now, with a smaller KV cache", V), Remedy("wait until the old engine has ended before the new one starts", "taking 80 GB down needs more than 5 s", V), LOWER, KV_BYTES, HEADLESS, FUSER_NOT, EXPANDABLE_NOT, STATS_NOT,
    ),
    "memory_profiling_race": (
        Remedy("start the engines of one GPU one after the other", "wait for /health of the first"), HOLDERS, KV_BYTES, FUSER_NOT,
    ),
    "mem_fraction_too_low": (SGLANG_RAISE, HOLDERS, QUANTISED, SGLANG_TP, SGLANG_CHUNK, SGLANG_GRAPHS, GRADIENT_NOT),
    "batch_budget_too_large": (
        TGI_PREFILL, TGI_TOTAL, HOLDERS, TGI_GRAPHS, QUANTISED, Remedy("plan to move to another server", "TGI has had no release since January 2026", T), GRADIENT_NOT,
    ),
    "allocator_config_conflict": (
        Remedy("unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF", "always right"),
        Remedy("--disable-custom-all-reduce", "keeps expandable segments with tensor parallelism; all-reduce goes through NCCL", V, when=("setting", frozenset({"custom_all_reduce"}))),
        Remedy("update to a release from June 2026 or later", "its custom all-reduce takes expandable segments", S, when=("setting", frozenset({"custom_all_reduce"}))),
        Remedy("update to 0.20.1 or newer", "turns expandable segments off around the sleep allocator by itself", V, before="0.20.1", when=("setting", frozenset({"expandable_segments"}))),
    ),
    "alloc_retry_recovered": (Remedy("nothing: start-up went on"), LLAMA_BATCH, LLAMA_CONTEXT, OLLAMA_CONTEXT),
    "gpu_kernel_smem_limit": (
        UPDATE_ENGINE, Remedy("another attention backend (--attention-backend, VLLM_ATTENTION_BACKEND before 0.13)", "the kernel's tiles are made for a larger GPU", V),
        Remedy("--shm-size", "that is /dev/shm, not the GPU's on-chip memory", against=True),
    ),
    "cuda_illegal_memory_access": (UPDATE_ENGINE, BLOCKING, Remedy("--enforce-eager, once", "tells whether the graphs are at fault", V), DRIVER_LOG, EXPANDABLE_NOT),
    "model_exceeds_system_memory": (RAM, Remedy("lower --gpu-memory-utilization", "on the CPU backend it is a share of RAM", V), SHORTER, Remedy("a smaller quantisation of the model"), OLLAMA_CONTEXT, MORE_RAM, LLAMA_LAYERS),
    "host_alloc_failure": (RAM, LESS_RAM, SAFETENSORS, MORE_RAM, LLAMA_CONTEXT, Remedy("sysctl vm.overcommit_memory vm.max_map_count", "2 refuses large maps although RAM is free"), EXPANDABLE_NOT),
    "host_pinned_alloc_failed": (Remedy("ulimit -l unlimited (docker: --ulimit memlock=-1)"), Remedy("GGML_CUDA_NO_PINNED=1", "silences it; transfers stay pageable", L), RAM),
    "host_cache_pool_full": (Remedy("raise LMCACHE_MAX_LOCAL_CPU_SIZE", "takes that much RAM", ("lmcache",)), Remedy("nothing, while the hit rate is good enough"),),
    "host_oom_kill_global": (KERNEL_LOG, RAM, LESS_RAM, SAFETENSORS, Remedy("give the engine a lower OOM score: OOMScoreAdjust=-500 in its unit", "another process is killed instead"), STATS_NOT),
    "host_oom_kill_cgroup": (KERNEL_LOG, MORE_RAM, LESS_RAM, SAFETENSORS, Remedy("in systemd: MemoryMax= of the unit {unit}"), Remedy("--gpu-memory-utilization", "is about GPU memory, this is RAM", V, against=True)),
    "host_oom_kill_userspace": (
        Remedy("journalctl -u systemd-oomd -u earlyoom --since '10 min ago'"), Remedy("ManagedOOMPreference=avoid in the engine's unit", "systemd-oomd only"), Remedy("RAY_memory_usage_threshold=0.98", "", ("ray",)), RAM, LESS_RAM,
    ),
    "worker_sigkilled": (KERNEL_LOG, Remedy("docker inspect -f '{{{{.State.OOMKilled}}}}' CONTAINER", "false can miss kills of other processes than the first"), MORE_RAM, LESS_RAM, SAFETENSORS, RAM),
    "shm_exhausted": (SHM_LOOK, SHM_SIZE, SHM_IPC, SHM_K8S, Remedy("NCCL_SHM_DISABLE=1", "slower, when nothing else may be changed")),
    "engine_core_died": (SIGNATURE_LOG, KERNEL_LOG, DRIVER_LOG, HOLDERS, RELEASE, Remedy("docker run --init, or tini", "reaps what a dead server leaves behind"), STATS_NOT),
    "engine_hang_watchdog": (LOGS, DRIVER_LOG, Remedy("py-spy dump --pid PID of the scheduler, before the restart"), Remedy("--watchdog-timeout N", "only if the step really takes this long", S), UPDATE_ENGINE),
    "nccl_timeout": (Remedy("find the rank that failed first, in all nodes' logs", "the others only waited"), DRIVER_LOG, KERNEL_LOG, Remedy("NCCL_DEBUG=INFO once", "names transport and peer"), SHM_LOOK),
    "orphaned_worker": (Remedy("gpu-oom-exporter release {root_pid}", "SIGTERM, then SIGKILL, to this one tree"), HOLDERS, RELEASE, Remedy("stop the API server with SIGTERM, never SIGKILL", "SIGKILL is what makes orphans"), FUSER_NOT),
    "zombie_vram_dead_pid": (HOLDERS, Remedy("end the parent or the thread that keeps the zombie", "a dead process cannot be killed again"), CORDON, Remedy("reboot, if the reset is refused"), FUSER_NOT),
    "driver_stuck_process": (Remedy("drain the node and reboot it", "no signal helps while the kernel waits in the driver; a reset is refused"), DRIVER_LOG, FUSER_NOT),
    "ipc_handle_holder": (Remedy("restart the importer, PID {pid}", "the exporting engine is gone; only the importer can let go"), HOLDERS, FUSER_NOT),
    "mps_server_holder": (Remedy("end the clients, then: echo quit | nvidia-cuda-mps-control", "ends every client of this node"), HOLDERS),
    "display_holder": (HEADLESS, Remedy("nothing, if the display is wanted"), FUSER_NOT),
    "pid_namespace_hidden": (Remedy("run in the host's PID namespace: docker run --pid=host, hostPID: true", "NVML names PIDs of the host"),),
    "idle_holder": (Remedy("ask the owner of PID {pid}"), Remedy("OLLAMA_KEEP_ALIVE=5m, or: ollama stop MODEL", "", O), Remedy("sleep mode: --enable-sleep-mode and POST /sleep", "", V, "0.7"), Remedy("gpu-oom-exporter release {pid}", "only with the owner's consent")),
    "vram_slow_leak": (Remedy("restart in a quiet hour, before the headroom is gone"), Remedy("watch gpu_oom_engine_growth_ratio", "growth outside of the pool"), UPDATE_ENGINE, KV_BYTES, EMPTY_NOT),
    "gpu_reset_blocked": (
        Remedy("stop what has it open: nvidia-persistenced, DCGM, exporters, the display; then reset"), Remedy("gpu-oom-exporter holders", "names who has the device file open"),
        Remedy("kill -USR1 of gpu-oom-exporter", "makes this exporter let go of the driver"), FUSER_NOT,
    ),
    "gpu_app_fault": (UPDATE_ENGINE, BLOCKING, Remedy("restart the application", "the GPU itself is fine unless it repeats on one PCI address"), DIAGNOSE),
    "gpu_ecc_error": (
        Remedy("restart the application; it used the page that failed", "Xid 94 is contained: other applications go on", when=("xid", frozenset({94}))),
        Remedy("drain the GPU now", when=("xid", frozenset({48, 64, 95, 140, 171, 172}))), CORDON, DIAGNOSE,
        Remedy("nvidia-smi -q -d ROW_REMAPPER,ECC", "a failed or exhausted remap means replacement"),
    ),
    "gpu_lost": (Remedy("drain the node and power-cycle it", "a reset cannot reach a GPU that is off the bus"), DRIVER_LOG, Remedy("check power, temperature and seating; replace when it repeats")),
    "gpu_driver_fault": (Remedy("drain the GPU"), CORDON, Remedy("reboot, if the reset is refused"), Remedy("update the driver", "GSP timeouts are fixed branch by branch")),
    "nvlink_fault": (Remedy("drain the node"), Remedy("nvidia-smi nvlink -s; nvidia-smi nvlink -e"), CORDON, Remedy("systemctl status nvidia-fabricmanager")),
    "gpu_recovery_required": (
        Remedy("do what the driver asks: {recovery_action}"), Remedy("drain the node and reboot it", when=("recovery_action", frozenset({"Node Reboot Required"}))),
        Remedy("drain the node, then: nvidia-smi --gpu-reset -i {gpu_id}", "needs root and no user of the GPU", when=("recovery_action", frozenset({"GPU Reset Required", "Drain and Reset"}))),
        Remedy("nvidia-smi -q | grep -A3 'GPU Recovery'", "tells what is still asked for"),
    ),
    "gpu_xid_info": (
        Remedy("nothing by itself"), DRIVER_LOG, Remedy("reset the GPU when convenient, so that the remapped row is used", when=("xid", frozenset({63}))),
        Remedy("look at the application: its channel was reset after its own error", when=("xid", frozenset({43, 45}))),
    ),
    "nvrm_alloc_failure": (DRIVER_LOG, Remedy("free -h; nvidia-smi", "kernel memory or GPU memory may be short"), HOLDERS, UPDATE_ENGINE),
    "display_vram_pressure": (HEADLESS, LOWER, Remedy("move the display to another GPU")),
    "docker_gpus_flag_unsupported": (Remedy("docker version", "--gpus needs a client from 19.03 on"), Remedy("write --gpus all as two words", "one quoted word gives the same text"), TOOLKIT),
    "container_toolkit_missing": (TOOLKIT, Remedy("docker context ls; systemctl status snap.docker.dockerd", "another daemon than the configured one is a common cause"), CONTAINERD),
    "nvidia_runtime_not_registered": (TOOLKIT, CONTAINERD, Remedy("systemctl restart docker (or containerd, kubelet)", "the configuration is read at start only")),
    "container_driver_too_old": (Remedy("update the host's driver to one for CUDA {required_cuda}"), Remedy("use an older image"), Remedy("NVIDIA_DISABLE_REQUIRE=1", "only where minor-version compatibility is known to work")),
    "nvidia_driver_not_loaded": (Remedy("sudo modprobe nvidia; dmesg | tail"), Remedy("reinstall the driver for this kernel (dkms status)", "a new kernel came without the module"), Remedy("disable Secure Boot or sign the module")),
    "driver_library_mismatch": (Remedy("stop all users of the GPU, then: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia"), Remedy("or reboot", "always enough"), Remedy("hold automatic driver updates: apt-mark hold 'nvidia-*'")),
    "container_gpu_access_lost": (Remedy("recreate the container"), Remedy("use CDI: docker run --device nvidia.com/gpu=all", "systemctl daemon-reload rewrites the device rules of legacy containers"), Remedy("create the /dev/char links: nvidia-ctk system create-dev-char-symlinks --create-all")),
    "fabric_manager_not_ready": (Remedy("systemctl start nvidia-fabricmanager", "of exactly the driver's version"), Remedy("nvidia-smi -q | grep -A2 Fabric", "State must be Completed")),
    "k8s_gpu_unavailable": (Remedy("kubectl delete pod POD", "a pod that failed admission is not tried again"), Remedy("kubectl -n kube-system rollout restart daemonset nvidia-device-plugin-daemonset"), Remedy("kubectl describe node NODE | grep nvidia.com/gpu"), DRIVER_LOG),
    "proxy_upstream_not_ready": (READY, LOGS, Remedy("raise the proxy's start-up tolerance to the model's load time")),
    "proxy_upstream_died": (LOGS, KERNEL_LOG, READY),
    "ssh_publickey_denied": (Remedy("ssh -v HOST", "shows which keys were offered"), Remedy("ssh-add -l; ssh-copy-id USER@{host}"), Remedy("for git: add the public key to the account, or clone over https")),
}  # fmt: skip
"""Category → what helps, in order; what is advised against comes last."""


def version_key(version: str) -> tuple[int, ...] | None:
    """*version* for comparison: its first three numbers; ``None`` when it has none ("0.6.6.post1" is 0.6.6)."""
    numbers = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else None


def _right(remedy: Remedy, fields: Mapping[str, Any], engine: str, version: str) -> bool:
    if engine and remedy.engines and engine not in remedy.engines:
        return False
    if remedy.when is not None and fields.get(remedy.when[0]) not in remedy.when[1]:
        return False
    known = version_key(version) if engine and engine in remedy.engines else None
    if known is None:
        return True
    since, before = version_key(remedy.since), version_key(remedy.before)
    return (since is None or known >= since) and (before is None or known < before)


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """*fields*, with what follows from them: the GPU as nvidia-smi wants it named, the share of it that is free."""
    more = dict(fields)
    if "pci" in fields:
        more["gpu_id"] = f"{fields['pci']}.0"
    if fields.get("total_bytes") and "free_bytes" in fields:
        share = int(100 * fields["free_bytes"] / fields["total_bytes"]) / 100
        if 0 < share < 1:
            more["fitting_utilization"] = share
    return more


def advise(category: str, fields: Mapping[str, Any], engine: str = "", version: str = "") -> list[str]:
    """What helps in this incident, in order, as sentences; *engine* and *version* may be unknown (empty)."""
    told = []
    fields = _derived(fields)
    # without a known engine, what is right for all comes first
    for remedy in sorted(
        ADVICE.get(category, ()), key=lambda row: (row.against, bool(row.engines) and (row.against or not engine))
    ):
        if not _right(remedy, fields, engine, version):
            continue
        text = _fill(remedy.do, fields)
        if text is None:
            continue
        limits = [remedy.caveat] if remedy.caveat else []
        if not engine and remedy.engines:
            limits.insert(0, " or ".join(NAMES[name] for name in remedy.engines))
        if remedy.versions and version_key(version) is None:
            limits.insert(0 if engine else 1, remedy.versions)
        told.append(("do not: " if remedy.against else "") + text + (f" ({'; '.join(limits)})" if limits else ""))
    return told


_PLACEHOLDERS = {"gpu_id": "GPU-UUID", "pid": "PID", "unit": "", "root_pid": "PID", "host": "HOST"}
"""What stands for a field that is not known; without an entry the whole row is left out."""


def _fill(text: str, fields: Mapping[str, Any]) -> str | None:
    values = {}
    for name in re.findall(r"(?<!\{)\{(\w+)\}(?!\})", text):
        value = fields.get(name, _PLACEHOLDERS.get(name))
        if value is None:
            return None
        values[name] = value
    return text.format(**values).rstrip()
