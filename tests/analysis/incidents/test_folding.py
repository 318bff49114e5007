"""Which lines are one incident: repeats, ranks, parents' copies, causes and consequences, retries, windows."""

from __future__ import annotations

from tests.eval_incidents import classify


def oom(tried: str = "2.00 GiB", gpu: int = 0, free: str = "1.00 GiB", extra: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity of 79.11 GiB of "
        f"which {free} is free. {extra}Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
        "PyTorch but unallocated."
    )


def categories(*lines: str) -> list[str]:
    return [incident.category for incident in classify("\n".join(lines).encode() + b"\n")]


DEAD = "ERROR 06-19 11:02:44 [async_llm.py:420] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
FILLER = ['INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK']


def test_repeats() -> None:
    """The same failure as repr, as exception and in the API server is one; a second rank is another."""
    found = classify("\n".join((
        f"(EngineCore_DP0 pid=7) ERROR 06-19 11:02:40 [core.py:1] {oom()}",
        f"(EngineCore_DP0 pid=7) {oom()}",
        f"(APIServer pid=1) RuntimeError: Worker failed with error '{oom()[len('torch.OutOfMemoryError: '):]}', please check the stack trace above",
        f"(EngineCore_DP1 pid=8) ERROR 06-19 11:02:40 [core.py:1] {oom()}",
    )).encode())  # fmt: skip
    assert [incident.fields["pid"] for incident in found] == [7, 8]


def test_devices() -> None:
    """Without PIDs, the device tells incidents apart."""
    assert len(categories(oom(gpu=0), oom(gpu=1), oom(gpu=0))) == 2


def test_consequence() -> None:
    """A dead engine is told only when nothing near explains it, before or after."""
    assert categories(DEAD) == ["engine_core_died"]
    assert categories(oom(), DEAD) == ["cuda_oom_generic"]
    assert categories(DEAD, oom()) == ["cuda_oom_generic"]
    assert categories(DEAD, *FILLER * 3000, oom()) == ["engine_core_died", "cuda_oom_generic"]


def test_pressure_is_no_cause() -> None:
    """Preemptions do not explain a death; a proxy's complaint does not either."""
    preempted = "Sequence group 1 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. total_num_cumulative_preemption=1"
    assert categories(f"WARNING 06-19 11:02:40 [scheduler.py:1] {preempted}", DEAD) == [
        "kv_cache_preemption",
        "engine_core_died",
    ]


def test_window_in_time() -> None:
    """Few lines but hours apart are two incidents."""
    first = f"ERROR 06-19 01:02:40 [core.py:1] {oom()}"
    later = f"ERROR 06-19 11:02:40 [core.py:1] {oom()}"
    assert len(categories(first, later)) == 2
    assert len(categories(first, first.replace("01:02:40", "01:03:10"))) == 1


def test_restart() -> None:
    """A new start of the server ends what was open: the same failure again is another incident."""
    start = "INFO 05-10 16:00:15 [api_server.py:1043] vLLM API server version 0.8.5"
    assert len(categories(start, oom(), start, oom())) == 2


def test_compose() -> None:
    """Two services in one log have their own incidents and their own consequences."""
    found = categories(f"vllm-a  | {oom()}", f"vllm-b  | {DEAD}", f"vllm-a  | {DEAD}")
    assert found == ["cuda_oom_generic", "engine_core_died"]


def test_retry() -> None:
    """An allocation that is tried again with less is forgiven; one that fails again is not."""
    failed = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on device 0: cudaMalloc failed: out of memory"
    compute = "graph_reserve: failed to allocate compute buffers"
    retry = "llama_context: compute buffer allocation failed, retrying without pipeline parallelism"
    assert categories(failed, compute, retry, "main: server is listening") == ["alloc_retry_recovered"]
    assert categories(failed, compute, retry, failed, compute) == ["cuda_oom_profiling"]


def test_kernel_kill() -> None:
    """The kernel's line is the cause of SIGKILL, of the dead worker and of systemd's result."""
    found = classify("\n".join((
        "Jan  9 11:20:31 node kernel: [81234.1] python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "Jan  9 11:20:31 node kernel: [81234.2] Out of memory: Killed process 43876 (VLLM::EngineCor) total-vm:1kB, anon-rss:1024kB, file-rss:1kB",
        "Jan  9 11:20:31 node systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.",
        "Jan  9 11:20:31 node vllm[700]: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        "Jan  9 11:20:32 node vllm[700]: vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    )).encode())  # fmt: skip
    (incident,) = found
    assert incident.category == "host_oom_kill_global"
    assert tuple(incident.fields[name] for name in ("pid", "task", "anon_rss_bytes", "invoker", "unit")) == (
        43876,
        "VLLM::EngineCor",
        1 << 20,
        "python3",
        "vllm.service",
    )


def test_xids() -> None:
    """Xid 45 follows another of the same GPU; on another GPU, or alone, it is told."""
    first = "[1.0] NVRM: Xid (PCI:0000:81:00): 31, pid=7, name=python, Ch 00000010"
    follows = "[1.1] NVRM: Xid (PCI:0000:81:00): 45, pid=7, name=python, Ch 00000011"
    assert categories(first, follows) == ["gpu_app_fault"]
    assert categories(first, first.replace("1.0", "1.05"), follows) == ["gpu_app_fault"]
    assert categories(first, follows.replace(":81:", ":c1:")) == ["gpu_app_fault", "gpu_xid_info"]
    assert categories(follows) == ["gpu_xid_info"]


def test_phase() -> None:
    """The phase is that of the traceback; without one, that of the last phase line of the same process."""
    loading = "(EngineCore pid=7) INFO 01-01 00:00:00 [gpu_model_runner.py:1] Starting to load model /m..."
    loaded = (
        "(EngineCore pid=7) INFO 01-01 00:00:09 [gpu_model_runner.py:1] Model loading took 15 GiB memory and 9 seconds"
    )
    mine = f"(EngineCore pid=7) ERROR 01-01 00:00:10 [core.py:1] {oom()}"
    assert categories(loading, mine) == ["cuda_oom_weights_load"]
    assert categories(loading, loaded, mine) == ["cuda_oom_generic"]
    assert categories(loading, mine.replace("pid=7", "pid=8")) == ["cuda_oom_generic"]
    frames = [
        "(EngineCore pid=7) ERROR 01-01 00:00:10 [core.py:1] Traceback (most recent call last):",
        '(EngineCore pid=7) ERROR 01-01 00:00:10 [core.py:1]   File "/x/gpu_worker.py", line 3, in determine_available_memory',
        "(EngineCore pid=7) ERROR 01-01 00:00:10 [core.py:1]     self.model_runner.profile_run()",
    ]
    assert categories(loading, *frames, mine) == ["cuda_oom_profiling"]


def test_interleaved_tracebacks() -> None:
    """Two ranks print at once; each incident has its own phase."""

    def rank(pid: int, text: str) -> str:
        return f"(VllmWorker rank={pid % 2} pid={pid}) ERROR 01-01 00:00:10 [x.py:1] {text}"

    found = classify("\n".join((
        rank(10, "Traceback (most recent call last):"), rank(11, "Traceback (most recent call last):"),
        rank(10, '  File "/x/a.py", line 1, in load_model'), rank(11, '  File "/x/b.py", line 1, in capture_model'),
        rank(11, oom(gpu=1)), rank(10, oom(gpu=0)),
    )).encode())  # fmt: skip
    assert {i.fields["pid"]: i.category for i in found} == {
        10: "cuda_oom_weights_load",
        11: "cuda_oom_cuda_graph_capture",
    }


def test_training() -> None:
    """A backward pass or an optimizer step is training."""
    for frame in ('File "/x/torch/_tensor.py", line 1, in backward', 'File "/x/torch/optim/adamw.py", line 9, in step'):
        assert categories(
            "Traceback (most recent call last):", '  File "/x/train.py", line 2, in <module>', f"  {frame}", oom()
        ) == ["cuda_oom_training"]


def test_tenants() -> None:
    """Another process is a co-tenant only when this one found itself; fragmentation goes before."""
    other = "Process 99 has 30.00 GiB memory in use. "
    itself = "Including non-PyTorch memory, this process has 71.00 GiB memory in use. "
    assert categories(oom(extra=other + itself)) == ["cuda_oom_co_tenant"]
    assert categories(oom(extra=itself + other)) == ["cuda_oom_co_tenant"]
    assert categories(oom(extra=other)) == ["cuda_oom_generic"]
    assert categories(oom(extra=itself + "Process 99 has 200.00 MiB memory in use. ")) == ["cuda_oom_generic"]
    assert categories(oom(tried="900.00 MiB", free="10.00 MiB", extra=other + itself)) == ["cuda_oom_fragmentation"]
    assert categories(oom(free="8.00 GiB", extra="71.50 GiB allowed; ")) == ["cuda_oom_fraction_limit"]


def test_driver_spellings() -> None:
    """Driver and runtime API names count as out of memory."""
    for text in ("CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "CUDA error: out of memory"):
        assert categories(f"RuntimeError: call failed: {text}") == ["cuda_oom_generic"]


def test_error_body() -> None:
    """An answer whose only key is error is the program's; any other JSON is not."""
    said = oom().replace("torch.OutOfMemoryError: ", "")
    assert categories('{"error": {"message": "' + said + '", "type": "InternalServerError"}}') == ["cuda_oom_generic"]
    assert categories('{"error": {"message": "' + said + '"}, "request": "r1"}') == []
    assert categories('{"levelname": "ERROR", "name": "vllm", "message": "' + said + '"}') == ["cuda_oom_generic"]
    assert categories('{"levelname": "INFO", "name": "vllm", "message": "' + said + '"}') == []


def test_same_process_again() -> None:
    """A later incident of the same process has its own traceback read, however often it failed before."""

    def burst(minute: int) -> list[str]:
        prefix = f"(Worker_TP0 pid=7) ERROR 10-25 13:{minute:02d}:43 [x.py:1] "
        return [
            prefix + "Traceback (most recent call last):",
            prefix + '  File "/v/worker.py", line 1, in execute_model',
            prefix + oom(),
        ]

    assert categories(*burst(1) * 6, *burst(30)) == ["cuda_oom_runtime"] * 2
    lines = "\n".join((*burst(1) * 6, *FILLER * 2500, *burst(2))).encode()
    assert (
        [i.category for i in classify(lines)]
        == [i.category for i in classify(lines, chunk=2000)]
        == ["cuda_oom_runtime"] * 2
    )


def test_restart_loop() -> None:
    """Containers give the same PIDs again: each start of the engine core is a run of its own."""
    lines = []
    for minute in range(3):
        lines += [
            f"(EngineCore_DP0 pid=77) INFO 10-25 13:0{minute}:00 [core.py:133] Initializing a V1 LLM engine (v0.11.0) with config: model='m'",
            f"(EngineCore_DP0 pid=77) ERROR 10-25 13:0{minute}:30 [core.py:708] ValueError: No available memory for the cache blocks. Try",
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    found = classify("\n".join(lines).encode())
    assert [incident.category for incident in found] == ["kv_cache_no_blocks"] * 3
    assert {"0.11.0"} == {incident.version for incident in found}


def test_several_victims() -> None:
    """Workers, units and pods are told apart by name where there is no PID."""
    killed = "Worker proc VllmWorker-{} died unexpectedly (exit code: -9), shutting down executor."
    assert len(categories(killed.format(1), killed.format(3), killed.format(1))) == 2
    assert (
        len(categories("a.service: Failed with result 'oom-kill'.", "b.service: Failed with result 'oom-kill'.")) == 2
    )
    assert len(categories("vllm-0   0/1   OOMKilled   3   5m", "vllm-1   0/1   OOMKilled   3   5m")) == 2


def test_death_told_again() -> None:
    """The API server reports the same dead engine for every request; after half an hour, or a start, it is another."""
    lines = [DEAD.replace("11:02", f"11:{minute:02d}") for minute in range(2, 30, 3)]
    assert categories(*lines) == ["engine_core_died"]
    assert len(categories(*lines, DEAD.replace("11:02", "11:50"))) == 2
    assert len(categories(*lines, "INFO:     Application startup complete.", DEAD.replace("11:02", "11:31"))) == 2
    first = f"ERROR 06-19 11:02:40 [core.py:1] {oom()}"
    assert categories(first, *lines) == ["cuda_oom_generic"]


def test_other_victims() -> None:
    """A JVM that the kernel killed does not explain a worker's SIGKILL; another pod's admission no death."""
    kernel = "Jan  9 11:20:31 node kernel: Out of memory: Killed process 812 ({}) total-vm:1kB, anon-rss:1024kB, file-rss:1kB"
    worker = "Jan  9 11:20:33 node vllm[700]: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."
    assert categories(kernel.format("pt_main_thread"), worker) == ["host_oom_kill_global"]
    assert categories(kernel.format("java"), worker) == ["host_oom_kill_global", "worker_sigkilled"]
    for other in ("mysql.service: Failed with result 'oom-kill'.", "redis-0   0/1   OOMKilled   3   5m"):
        assert len(categories(other, worker)) == 2, other
    assert len(categories(kernel.format("java"), DEAD)) == 2
    admission = "Pod Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested:1, Available: 0, which is unexpected"
    assert categories(admission, DEAD) == ["k8s_gpu_unavailable", "engine_core_died"]


def test_xid_order() -> None:
    """The channel removal may be printed before the Xid that caused it."""
    removed = "[1.0] NVRM: Xid (PCI:0000:81:00): 45, pid=7, name=python, Ch 00000011"
    lost = "[1.1] NVRM: Xid (PCI:0000:81:00): 79, pid=7, name=python, GPU has fallen off the bus."
    assert categories(removed, lost) == ["gpu_lost"]


def test_nodes_and_replicas() -> None:
    """Equal PIDs on two nodes, and the KV pools of two replicas, are not one."""
    assert (
        len(
            categories(
                f"(RayWorkerWrapper pid=10, ip=10.0.0.1) {oom()}", f"(RayWorkerWrapper pid=10, ip=10.0.0.2) {oom()}"
            )
        )
        == 2
    )
    retract = "[2026-05-24 03:51:47 {}] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.1 -> 0.3"
    assert len(categories(retract.format("DP0 TP0"), retract.format("DP1 TP0"), retract.format("DP0 TP1"))) == 2


def test_backends() -> None:
    """A proxy's paths are not backends of their own; its backends are."""
    line = '2026/03/01 10:11:12 [error] 29#29: *1 connect() failed (111: Connection refused) while connecting to upstream, upstream: "http://127.0.0.1:{}", host: "h"'
    assert len(categories(line.format("8000/v1/models"), line.format("8000/v1/completions"))) == 1
    assert len(categories(line.format("8000/v1/models"), line.format("8001/v1/models"))) == 2


def test_turn_of_the_year() -> None:
    """Stamps without a year go on over New Year's Eve; offsets of time zones are minded."""
    assert (
        len(categories(f"ERROR 12-31 23:59:59 [core.py:1] {oom()}", f"ERROR 01-01 00:00:02 [core.py:1] {oom()}")) == 1
    )
    assert len(categories(f"2026-10-25T02:59:59+02:00 {oom()}", f"2026-10-25T02:00:01+01:00 {oom()}")) == 1
    assert len(categories(f"2026-10-25T02:59:59+02:00 {oom()}", f"2026-10-25T02:59:59+01:00 {oom()}")) == 2


def test_small_pool() -> None:
    """A process that has hardly begun on a GPU full of others is not fragmented."""
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB "
        "is free. Process 999 has 70.00 GiB memory in use. Including non-PyTorch memory, this process has 8.00 GiB memory in use. Of the "
        "allocated memory 100.00 MiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
    )
    assert categories(text) == ["cuda_oom_co_tenant"]


def test_ready_server() -> None:
    """What runs out after the server came up was serving."""
    assert categories("INFO:     Application startup complete.", f"(EngineCore pid=7) {oom()}") == ["cuda_oom_runtime"]
    assert categories(
        "[2025-04-11 09:21:41] The server is fired up and ready to roll!", f"[2025-04-11 09:22:41 TP0] {oom()}"
    ) == ["cuda_oom_runtime"]


def test_units_in_one_journal() -> None:
    """The phase of one unit is not another's."""
    loading = "Jan  9 11:20:31 node vllm[10]: Loading safetensors checkpoint shards:   3% Completed | 1/37"
    assert categories(loading, f"Jan  9 11:20:32 node comfy[11]: {oom()}") == ["cuda_oom_generic"]
    assert categories(loading, f"Jan  9 11:20:32 node vllm[10]: {oom()}") == ["cuda_oom_weights_load"]
