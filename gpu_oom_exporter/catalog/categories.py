"""What can go wrong: one row per incident category, with the words a person reads first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a category is when nothing else is known."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class Group(StrEnum):
    """The groups that alerts and runbooks know (`group` of `gpu_oom_incidents_recent`)."""

    CUDA_OOM = "cuda_oom"
    STARTUP = "startup"
    HOST_OOM = "host_oom"
    CONTAINER_RUNTIME = "container_runtime"
    ENGINE_DIED = "engine_died"
    GPU = "gpu"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Category:
    """One kind of incident: *title* says what happened, *why* what that means, each in one sentence."""

    name: str
    group: Group
    severity: Severity
    title: str
    why: str


I, W, E, C = Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.CRITICAL  # noqa: E741 - one letter per column
G = Group

CATEGORIES = {
    row.name: row
    for row in (
        # device memory
        Category("cuda_oom_weights_load", G.STARTUP, C, "Out of GPU memory while loading weights",
                 "The weights alone do not fit into what was free on this GPU."),
        Category("cuda_oom_profiling", G.STARTUP, C, "Out of GPU memory during warm-up",
                 "The largest batch the settings allow does not fit beside the weights."),
        Category("cuda_oom_kv_alloc", G.STARTUP, C, "The KV cache could not be allocated",
                 "The context asked for needs a larger KV buffer than the GPU has left."),
        Category("cuda_oom_cuda_graph_capture", G.STARTUP, C, "Out of GPU memory while capturing CUDA graphs",
                 "The pools of the graphs did not fit into what weights and KV cache had left."),
        Category("cuda_oom_sampler_warmup", G.STARTUP, C, "Out of GPU memory while warming up the sampler",
                 "As many sequences as may run at once do not fit at the sampler."),
        Category("cuda_oom_runtime", G.CUDA_OOM, C, "Out of GPU memory while serving",
                 "A request needed more activation memory than the GPU had left beside the pool."),
        Category("cuda_oom_fragmentation", G.CUDA_OOM, C, "Out of GPU memory by fragmentation",
                 "The allocator held enough bytes, but in pieces that did not fit the request."),
        Category("cuda_oom_co_tenant", G.CUDA_OOM, E, "Out of GPU memory because another process holds it",
                 "Without the other process on this GPU the request would have fitted."),
        Category("cuda_oom_fraction_limit", G.CUDA_OOM, E, "Out of the memory fraction this process may use",
                 "The GPU had room; the process's own limit did not allow it."),
        Category("cuda_oom_sleep_wake", G.CUDA_OOM, E, "The engine could not take its memory back on waking up",
                 "Something took the GPU's memory while the engine slept."),
        Category("cuda_oom_library", G.CUDA_OOM, E, "A CUDA library ran out of GPU memory",
                 "cuBLAS, NCCL or the allocator's own checks failed where memory is the usual reason."),
        Category("cuda_oom_generic", G.CUDA_OOM, E, "Out of GPU memory",
                 "The log does not say what the process was doing."),
        Category("cuda_oom_training", G.CUDA_OOM, C, "Out of GPU memory in a training step",
                 "Activations, gradients and optimizer state of one step do not fit."),
        Category("kv_cache_no_blocks", G.STARTUP, C, "No memory is left for the KV cache",
                 "Weights, activations and graphs use up the share of the GPU that the engine may take."),
        Category("kv_cache_below_max_model_len", G.STARTUP, C, "The KV cache is smaller than one full request",
                 "A request of the maximum length could never be served, so the engine does not start."),
        Category("kv_cache_exhausted", G.OTHER, E, "The KV cache ran out and requests failed",
                 "The requests that ran at once needed more KV cache than there is."),
        Category("kv_cache_preemption", G.OTHER, W, "The KV cache is full and requests are put back",
                 "Work goes on, but preempted requests are computed again."),
        Category("startup_free_memory_below_target", G.STARTUP, C, "The GPU was not empty enough at start-up",
                 "Something else holds memory of the share that the engine wants."),
        Category("memory_profiling_race", G.STARTUP, E, "GPU memory changed while the engine measured it",
                 "Another process gave memory back during the measurement, so the engine does not trust it."),
        Category("mem_fraction_too_low", G.STARTUP, C, "The static memory share is too small for the weights",
                 "Nothing of SGLang's static share is left for the KV cache."),
        Category("batch_budget_too_large", G.STARTUP, C, "The token budget does not fit",
                 "The largest batch that the settings allow does not fit into GPU memory."),
        Category("allocator_config_conflict", G.STARTUP, E, "An allocator setting conflicts with the engine",
                 "Expandable segments do not go together with a memory pool or with custom all-reduce."),
        Category("alloc_retry_recovered", G.OTHER, I, "An allocation failed and the smaller retry succeeded",
                 "Start-up went on; this is no failure."),
        Category("gpu_kernel_smem_limit", G.OTHER, E, "A kernel asks for more on-chip shared memory than the GPU has",
                 "This is neither GPU memory nor /dev/shm: the kernel's tiles are too large for this GPU."),
        Category("cuda_illegal_memory_access", G.ENGINE_DIED, C, "A kernel used a bad address",
                 "A fault of a kernel or of the driver, not a lack of memory."),
        # host memory
        Category("model_exceeds_system_memory", G.HOST_OOM, E, "The model needs more RAM than the host has free",
                 "The check before loading refused it."),
        Category("host_alloc_failure", G.HOST_OOM, E, "The host could not give memory",
                 "An allocation of RAM failed (errno 12), not one of GPU memory."),
        Category("host_pinned_alloc_failed", G.OTHER, W, "Pinned host memory could not be had",
                 "The program falls back to pageable memory; transfers are slower."),
        Category("host_cache_pool_full", G.OTHER, W, "The CPU cache pool is full",
                 "Offloaded KV cache is evicted or not stored; no request fails."),
        Category("host_oom_kill_global", G.HOST_OOM, C, "The kernel killed a process because the host ran out of RAM",
                 "RAM and swap of the whole host were used up."),
        Category("host_oom_kill_cgroup", G.HOST_OOM, C, "A process was killed at its container's memory limit",
                 "The cgroup's limit was reached; the host may have RAM left."),
        Category("host_oom_kill_userspace", G.HOST_OOM, C, "A memory watchdog killed the process",
                 "systemd-oomd, earlyoom or Ray acted before the kernel had to."),
        Category("worker_sigkilled", G.HOST_OOM, C, "A worker was killed with SIGKILL",
                 "Usually the kernel's OOM killer; the kernel log proves or refutes it."),
        Category("shm_exhausted", G.HOST_OOM, E, "/dev/shm is full or too small",
                 "NCCL, PyTorch workers or the engine's queues need more shared memory than there is."),
        # lifecycle
        Category("engine_core_died", G.ENGINE_DIED, C, "The engine died and this log does not say why",
                 "Only the consequence is here; the cause is earlier, in another log, or in the kernel's."),
        Category("engine_hang_watchdog", G.ENGINE_DIED, C, "The engine hung until its watchdog ended it",
                 "A forward pass or a collective never came back."),
        Category("nccl_timeout", G.ENGINE_DIED, C, "A collective operation timed out",
                 "A peer is lost, hung or far behind; look for the first rank that failed."),
        # who holds memory
        Category("orphaned_worker", G.OTHER, E, "A worker holds GPU memory and its server is gone",
                 "Nobody living will use this memory again."),
        Category("zombie_vram_dead_pid", G.OTHER, E, "GPU memory is charged to a process that is dead",
                 "The driver has not finished taking the process down."),
        Category("driver_stuck_process", G.GPU, C, "A process is stuck in the driver and cannot be killed",
                 "SIGKILL is pending and ignored while the kernel waits for the GPU."),
        Category("ipc_handle_holder", G.OTHER, E, "A process keeps another engine's memory mapped",
                 "CUDA IPC: the exporter is gone, the importer still holds its bytes."),
        Category("mps_server_holder", G.OTHER, W, "The MPS server holds memory of clients",
                 "A client that ended badly can leave its memory with the server."),
        Category("display_holder", G.OTHER, I, "The display holds GPU memory",
                 "Desktop processes (type G) use this GPU."),
        Category("pid_namespace_hidden", G.OTHER, I, "Memory is in use by processes that cannot be seen from here",
                 "This process table ends at the container's PID namespace; that is no zombie."),
        Category("idle_holder", G.OTHER, I, "A process holds GPU memory and does nothing",
                 "By design (keep-alive) or forgotten."),
        Category("vram_slow_leak", G.OTHER, W, "GPU memory of a process grows and never levels off",
                 "A leak, or a cache without a bound."),
        Category("gpu_reset_blocked", G.GPU, W, "The GPU cannot be reset while something uses it",
                 "A monitor, a display or an application still has the device open."),
        # hardware and driver
        Category("gpu_app_fault", G.GPU, E, "The GPU reported a fault of a program",
                 "A kernel read or wrote where it must not, or the driver mapped it wrongly."),
        Category("gpu_ecc_error", G.GPU, C, "The GPU's memory hardware failed",
                 "Uncorrectable ECC, or a repair that did not succeed."),
        Category("gpu_lost", G.GPU, C, "The GPU is gone from the bus",
                 "Power, heat, the slot or the board; only a power cycle brings it back."),
        Category("gpu_driver_fault", G.GPU, C, "The driver or the GPU's firmware stopped answering",
                 "The GPU needs a reset before it serves again."),
        Category("nvlink_fault", G.GPU, C, "An NVLink connection failed",
                 "Traffic between GPUs is not safe until the link is reset or replaced."),
        Category("gpu_recovery_required", G.GPU, C, "The driver asks for a recovery action",
                 "It names the action itself; until then the GPU may fail again."),
        Category("gpu_xid_info", G.OTHER, W, "The driver reported an event for information",
                 "By itself nothing has to be done."),
        Category("nvrm_alloc_failure", G.GPU, E, "The NVIDIA kernel driver could not allocate memory",
                 "Kernel or GPU memory for the driver's own structures ran out."),
        Category("display_vram_pressure", G.OTHER, W, "Graphics fell back to system memory",
                 "The display found no GPU memory: compute on this GPU leaves none."),
        # containers
        Category("docker_gpus_flag_unsupported", G.CONTAINER_RUNTIME, E, "This docker command does not know --gpus",
                 "The client is older than 19.03, or the words were quoted as one."),
        Category("container_toolkit_missing", G.CONTAINER_RUNTIME, E, "Docker has no NVIDIA device driver",
                 "The NVIDIA Container Toolkit is not installed or not known to this daemon."),
        Category("nvidia_runtime_not_registered", G.CONTAINER_RUNTIME, E,
                 "The container runtime nvidia is not registered",
                 "The toolkit may be installed, but this runtime's configuration does not name it."),
        Category("container_driver_too_old", G.CONTAINER_RUNTIME, E,
                 "The host's driver is older than the image needs",
                 "The image wants a newer CUDA than the driver supports."),
        Category("nvidia_driver_not_loaded", G.CONTAINER_RUNTIME, C, "The NVIDIA driver is not loaded",
                 "The kernel module is missing, not built for this kernel, or was unloaded."),
        Category("driver_library_mismatch", G.CONTAINER_RUNTIME, E,
                 "NVIDIA library and kernel module have different versions",
                 "The driver was updated while the old module is still loaded."),
        Category("container_gpu_access_lost", G.CONTAINER_RUNTIME, E, "A running container lost its GPU",
                 "The container's device permissions were rewritten, usually by systemctl daemon-reload."),
        Category("fabric_manager_not_ready", G.CONTAINER_RUNTIME, C, "The NVSwitch fabric is not initialised",
                 "The Fabric Manager is not running or has another version than the driver."),
        Category("k8s_gpu_unavailable", G.CONTAINER_RUNTIME, E, "Kubernetes could not give the pod its GPU",
                 "The device plugin's count and the kubelet's do not agree."),
        # around the engine
        Category("proxy_upstream_not_ready", G.OTHER, W, "The proxy reached no engine",
                 "Connection refused: the engine is loading or not running."),
        Category("proxy_upstream_died", G.OTHER, E, "The engine closed a connection in the middle of an answer",
                 "It died or was restarted while a request was in flight."),
        Category("ssh_publickey_denied", G.OTHER, E, "SSH refused the key",
                 "Nothing about GPUs: the remote side does not accept this public key."),
    )
}  # fmt: skip
"""Category name → row, in the order of the documentation."""

SAID_BY_HOST = frozenset(
    row.name
    for row in CATEGORIES.values()
    if row.group in (Group.GPU, Group.CONTAINER_RUNTIME) or row.name.startswith("host_oom_kill_")
) | frozenset({
    "gpu_xid_info", "display_vram_pressure", "orphaned_worker", "zombie_vram_dead_pid", "ipc_handle_holder",
    "mps_server_holder",
    "display_holder", "pid_namespace_hidden", "idle_holder", "vram_slow_leak", "ssh_publickey_denied",
})  # fmt: skip
"""Categories that only the host's own logs may report: what a container prints is about itself."""

SAID_BY_KERNEL = frozenset({
    "host_oom_kill_global", "host_oom_kill_cgroup", "gpu_app_fault", "gpu_ecc_error", "gpu_lost",
    "gpu_driver_fault", "nvlink_fault",
    "gpu_recovery_required", "gpu_xid_info", "nvrm_alloc_failure", "display_vram_pressure",
})  # fmt: skip
"""Categories that the kernel's messages may report, and no others."""

RUNBOOK = "docs/incidents.md#{name}"


def runbook(name: str) -> str:
    """Where the category *name* is explained."""
    return RUNBOOK.format(name=name)


FIELDS = {
    "pid": "PID in the engine's prefix (inside its container), else the one the message names, else the journal's",
    "pids, root_pid": "processes that hold GPU memory, in order of appearance; the top of their tree",
    "rank, ranks": "rank of the engine that printed it, or all that printed the same",
    "gpu": "device index as the process sees it",
    "pci, mig_gi": "PCI address without function, and MIG GPU instance",
    "xid, recovery_action": "Xid number; what the driver asks for",
    "process, task, invoker, worker": "process of an Xid; victim and invoker of the OOM killer; name of a worker",
    "tried_bytes": "size of the GPU allocation that failed",
    "requested_bytes": "the same for host, pinned and shared memory",
    "total_bytes, free_bytes": "size of the GPU, and what the driver had free",
    "allocated_bytes, reserved_unallocated_bytes, private_pool_bytes": "PyTorch's pool: live, unused, graphs",
    "allowed_bytes": "limit of the process's own memory fraction",
    "process_bytes, listed_processes": "what the process itself and the listed others hold, with PIDs of the host",
    "used_bytes, gpu_processes": "memory held according to a pasted nvidia-smi, and how many processes hold it",
    "desired_bytes, gpu_memory_utilization": "what vLLM wants at start-up",
    "initial_free_bytes, current_free_bytes": "before and after vLLM's memory profiling",
    "initial_used_bytes, current_used_bytes": "the same as vLLM 0.7 to 0.10 print it for V0",
    "max_model_len, estimated_max_model_len": "longest request, and the longest that would fit, in tokens",
    "kv_needed_bytes, kv_available_bytes, kv_cache_tokens": "KV cache for one full request, and what there is",
    "cudagraph_estimate_bytes": "vLLM's estimate of graph memory before the KV cache",
    "num_dummy_requests, prefill_tokens, total_tokens, profiled_max_tokens": "sizes of warm-up and token budget",
    "requested_tokens, available_tokens, retracted_requests, cumulative_preemptions": "KV pressure",
    "mode": "how KV pressure was met: recompute, swap, retract, retry_smaller_batch",
    "setting, library": "the conflicting setting; the library that ran out",
    "required_bytes, limit_bytes, available_bytes": "needed, allowed by the hardware, there",
    "anon_rss_bytes, cgroup, unit, killed_processes": "of a victim: RAM, cgroup, systemd unit, how many",
    "pod, namespace, container, step, device": "of a victim: pod, namespace, container id, Slurm step, plugin's GPU",
    "exit_code, signal, errno, status, cuda_error": "numbers and names as printed",
    "timeout_s, timeout_ms": "of a watchdog",
    "segment, host, upstream, runtime, required_cuda, library_version": "texts as printed",
    "requested, available": "devices asked of Kubernetes, and there",
    "container_gone, slope_bytes_per_hour": "the runtime does not know the container; fitted growth",
}
"""Names of an incident's fields → what they mean; a field that the log does not hold is absent."""
