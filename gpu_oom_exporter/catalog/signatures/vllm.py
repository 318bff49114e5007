"""vLLM's own messages, 0.2.7 to 0.33 (releases of each text: the project's source at those tags)."""

from __future__ import annotations

from gpu_oom_exporter.catalog.signatures.signature import SIZE, Role, Signature

_DIED = "engine_core_died"

VLLM = (
    Signature(
        name="vllm_free_memory_below_target",  # 0.9.2 on; the device is named since 0.14.1
        anchor="on startup is less than desired GPU memory utilization",
        pattern=r"Free memory on device (?:\w+:(?P<gpu>\d+) )?\((?P<free_bytes>[\d.]+)/(?P<total_bytes>[\d.]+) GiB\) on startup "
        rf"is less than desired GPU memory utilization \((?P<gpu_memory_utilization>[\d.]+), (?P<desired_bytes>{SIZE})\)",
        category="startup_free_memory_below_target",
        engine="vllm",
        units={"free_bytes": "GiB", "total_bytes": "GiB"},
        examples=(
            "ValueError: Free memory on device (58.07/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, 71.24 "
            "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            "ValueError: Free memory on device cuda:1 (19.71/22.05 GiB) on startup is less than desired GPU memory utilization "
            "(0.92, 20.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ),
        near_misses=(
            "Free memory on device (177.66/178.36 GiB) on startup. Desired GPU memory utilization is (0.9, 160.53 GiB).",
        ),
    ),
    Signature(
        name="vllm_free_memory_below_budget",  # 0.32 on
        anchor="budget after excluding external",
        pattern=r"Free memory on device (?:\w+:(?P<gpu>\d+) )?\((?P<free_bytes>[\d.]+)/(?P<total_bytes>[\d.]+) GiB\) on startup "
        rf"is less than the engine's budget after excluding external process's weights(?: \((?P<desired_bytes>{SIZE}))?",
        category="startup_free_memory_below_target",
        engine="vllm",
        units={"free_bytes": "GiB", "total_bytes": "GiB"},
        examples=(
            "ValueError: Free memory on device cuda:0 (30.10/79.15 GiB) on startup is less than the engine's budget after "
            "excluding external process's weights (41.20 GiB).",
        ),
    ),
    Signature(
        name="vllm_external_weights",  # 0.32 on
        anchor="Externally held weights on device",
        pattern=r"Externally held weights on device (?:\w+:(?P<gpu>\d+) )?.*exceed the desired GPU memory utilization",
        category="startup_free_memory_below_target",
        engine="vllm",
        examples=(
            "ValueError: Externally held weights on device cuda:0 (75.00 GiB) exceed the desired GPU memory utilization (0.9, 71.2 GiB)",
        ),
    ),
    Signature(
        name="vllm_cpu_memory_below_target",  # the CPU backend, 0.20 on
        anchor="is less than desired CPU memory utilization",
        pattern=rf"Available memory on node \S+ \((?P<available_bytes>[\d.]+)/[\d.]+ GiB\) on startup is less than desired CPU "
        rf"memory utilization(?: \([\d.]+, (?P<required_bytes>{SIZE})\))?",
        category="model_exceeds_system_memory",
        engine="vllm",
        units={"available_bytes": "GiB"},
        examples=(
            "ValueError: Available memory on node 0 (3.10/15.60 GiB) on startup is less than desired CPU memory utilization (0.9, 14.04 GiB).",
        ),
    ),
    Signature(
        name="vllm_no_blocks",
        anchor="No available memory for the cache blocks",
        pattern=r"No available memory for the cache blocks",
        category="kv_cache_no_blocks",
        engine="vllm",
        examples=(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        ),
        near_misses=(
            '    raise ValueError("No available memory for the cache blocks. "',
            "See the section 'No available memory for the cache blocks' of the handbook.",
        ),
    ),
    Signature(
        name="vllm_auto_fit_failed",
        anchor="Cannot auto-fit max_model_len",
        pattern=r"Cannot auto-fit max_model_len: not enough GPU memory",
        category="kv_cache_no_blocks",
        engine="vllm",
        examples=("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.",),
        near_misses=("INFO 01-01 00:00:00 [x.py:1] Auto-fit max_model_len: reduced from 131072 to 4096 to fit in available KV cache memory",),
    ),
    Signature(
        name="vllm_max_len_v0",
        anchor="is larger than the maximum number of tokens that can be stored in KV cache",
        pattern=r"model's max seq len \((?P<max_model_len>\d+)\) is larger than the maximum number of tokens that can be stored in KV "
        r"cache \((?P<kv_cache_tokens>\d+)\)",
        category="kv_cache_below_max_model_len",
        engine="vllm",
        examples=(
            "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache "
            "(7120). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
        ),
    ),
    Signature(
        name="vllm_max_len_v1",
        anchor="To serve at least one request with the model",
        pattern=r"To serve at least one request with the models?'s max seq len \((?P<max_model_len>\d+)\),? "
        rf"\(?(?P<kv_needed_bytes>{SIZE}) KV cache is needed, which is larger than the available KV cache memory "
        rf"\((?P<kv_available_bytes>{SIZE})\)(?:\. Based on the available memory,? the estimated maximum model length is "
        r"(?P<estimated_max_model_len>\d+))?",
        category="kv_cache_below_max_model_len",
        engine="vllm",
        examples=(
            "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which is "
            "larger than the available KV cache memory (3.05 GiB). Based on the available memory, the estimated maximum model length "
            "is 33312. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
            "ValueError: To serve at least one request with the model's max seq len (8192), (1.00 GB KV cache is needed, which is "
            "larger than the available KV cache memory (0.20 GB). Try increasing `gpu_memory_utilization`",
        ),
        near_misses=(
            '    f"To serve at least one request with the model\'s max seq len "',
        ),
    ),
    Signature(
        name="vllm_graph_estimate",  # 0.18.1 on
        anchor="Estimated CUDA graph memory: ",
        pattern=rf"^Estimated CUDA graph memory: (?P<cudagraph_estimate_bytes>{SIZE}) total",
        category="kv_cache_no_blocks",
        role=Role.DETAIL,
        engine="vllm",
        examples=("(Worker_TP1 pid=44) INFO 08-19 05:56:57 [gpu_model_runner.py:6936] Estimated CUDA graph memory: 97.20 GiB total",),
    ),
    Signature(
        name="vllm_memory_profiling",
        anchor="Error in memory profiling.",
        pattern=rf"Error in memory profiling\. Initial free memory (?P<initial_free_bytes>{SIZE}|\d+), current free memory "
        rf"(?P<current_free_bytes>{SIZE}|\d+)",
        category="memory_profiling_race",
        engine="vllm",
        examples=(
            "AssertionError: Error in memory profiling. Initial free memory 81.55 GiB, current free memory 88.96 GiB. This happens when",
            "AssertionError: Error in memory profiling. Initial free memory 24858329088, current free memory 25010372608. This happens when "
            "the GPU memory was not properly cleaned up before initializing the vLLM instance.",
        ),
    ),
    Signature(
        name="vllm_memory_profiling_used",  # V0 since 0.7
        anchor="Error in memory profiling.",
        pattern=r"Error in memory profiling\. Initial used memory (?P<initial_used_bytes>\d+), currently used memory (?P<current_used_bytes>\d+)",
        category="memory_profiling_race",
        engine="vllm",
        examples=("AssertionError: Error in memory profiling. Initial used memory 500, currently used memory 400. This happens when",),
    ),
    Signature(
        name="vllm_load_failed",  # 0.13 on
        anchor="Failed to load model - not enough GPU memory",
        pattern=r"Failed to load model - not enough GPU memory",
        category="cuda_oom_weights_load",
        phase="weights",
        engine="vllm",
        examples=(
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights, increasing "
            "--tensor-parallel-size, or using --quantization.",
        ),
    ),
    Signature(
        name="vllm_sampler_warmup",
        anchor="out of memory occurred when warming up",
        pattern=r"CUDA out of memory occurred when warming up (?:sampler|pooler)(?: \(task=[^)]*\))? with (?P<num_dummy_requests>\d+) dummy requests",
        category="cuda_oom_sampler_warmup",
        phase="sampler",
        engine="vllm",
        examples=(
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`",
            "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 64 dummy requests. Please try lowering",
        ),
        near_misses=('    raise RuntimeError("CUDA out of memory occurred when warming up sampler with "',),
    ),
    Signature(
        name="vllm_preempted",  # V0: the first and then every 50th
        anchor="is preempted by PreemptionMode",
        pattern=r"Sequence group .* is preempted by PreemptionMode\.(?P<mode>RECOMPUTE|SWAP) mode because there is not enough KV cache space"
        r".*total(?:_num)?_cumulative_preemption(?:_cnt)?=(?P<cumulative_preemptions>\d+)",
        category="kv_cache_preemption",
        engine="vllm",
        examples=(
            "WARNING 10-28 11:16:41 scheduler.py:1483] Sequence group chat-1 is preempted by PreemptionMode.SWAP mode because there is not "
            "enough KV cache space. This can affect the end-to-end performance. total_num_cumulative_preemption=51",
        ),
    ),
    Signature(
        name="vllm_swap_space_gone",  # V0
        anchor="Aborted due to the lack of CPU swap space",
        pattern=r"Aborted due to the lack of CPU swap space",
        category="kv_cache_exhausted",
        engine="vllm",
        examples=("RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space to avoid this error.",),
    ),
    *(
        Signature(
            name=f"vllm_{verb}_{phase}",
            anchor=anchor,
            pattern=rf"{anchor}'?(?:{methods})\b",
            category="cuda_oom_generic",
            role=Role.DETAIL,
            phase=phase,
            engine="vllm",
            examples=(example.format(methods.split("|")[0]),),
        )
        for verb, anchor, example in (
            ("executing", "Error executing method ", "Error executing method '{}'. This might cause deadlock in distributed execution."),
            ("processing", "while processing method ", "Exception in worker VllmWorkerProcess while processing method {}: it failed"),
        )
        for phase, methods in (
            ("profiling", "determine_available_memory|determine_num_available_blocks|compile_or_warm_up_model"),
            ("weights", "load_model|init_device"),
            ("kv_alloc", "initialize_cache|initialize_from_config|init_cache_engine"),
            ("graph", "capture_model"),
            ("wake", "wake_up"),
            ("runtime", "execute_model|start_worker_execution_loop|sample_tokens"),
        )
    ),
    # consequences
    *(
        Signature(
            name=f"vllm_{name}",
            anchor=anchor,
            pattern=pattern,
            category=_DIED,
            role=Role.CONSEQUENCE,
            engine="vllm",
            examples=(example,),
            near_misses=near_misses,
        )
        for name, anchor, pattern, example, near_misses in (
            (
                "engine_dead",
                "EngineDeadError",
                r"^(?:[\w.]+\.)?(?:MQ|Async)?EngineDeadError\b|[( ](?:[\w.]+\.)?(?:MQ|Async)?EngineDeadError[:(]",
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
                ("    raise EngineDeadError()", "    except EngineDeadError as e:"),
            ),
            (
                "init_failed",
                "initialization failed",
                r"(?:Engine core|WorkerProc) initialization failed",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
                ('    raise RuntimeError("Engine core initialization failed. "', "INFO plugin initialization failed, going on without it"),
            ),
            (
                "loop_dead",
                "Background loop has errored already",
                r"Background loop has errored already",
                "RuntimeError: Background loop has errored already.",
                (),
            ),
            (
                "engine_process_failed",
                "Engine process failed to start",
                r"Engine process failed to start",
                "RuntimeError: Engine process failed to start. See stack trace for the root cause.",
                (),
            ),
            (
                "core_failed_to_start",
                "EngineCore failed to start",
                r"^EngineCore failed to start",
                "(EngineCore_DP0 pid=77) ERROR 10-25 13:08:43 [core.py:708] EngineCore failed to start.",
                (),
            ),
            (
                "core_fatal",
                "EngineCore encountered a fatal error",
                r"^EngineCore encountered a fatal error",
                "ERROR 10-25 13:08:43 [core.py:708] EngineCore encountered a fatal error.",
                (),
            ),
            (
                "executor_failed",
                "Executor failed.",
                r"RuntimeError: Executor failed\.",
                "RuntimeError: Executor failed.",
                (),
            ),
        )
    ),
    Signature(
        name="died_unexpectedly",
        anchor="died unexpectedly",
        pattern=r"(?:Worker proc (?P<worker>\S+)|Engine core proc(?:ess)? \S+|[Tt]he actor|Scheduler process|worker process) died unexpectedly"
        r"(?:[.,; ]*$|[.,] \w|\.| before| \(exit code: (?:None|\d+|-[1-8]|-\d\d)\))",
        category=_DIED,
        role=Role.CONSEQUENCE,
        examples=(
            "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
            "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.",
            "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        ),
        near_misses=("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",),
    ),
    # where the process is
    Signature(
        name="vllm_version",
        anchor="vLLM API server version",
        pattern=r"^vLLM API server version (?P<version>\d[\w.]*)",
        role=Role.START,
        engine="vllm",
        examples=("INFO 05-10 16:00:15 [api_server.py:1043] vLLM API server version 0.8.5",),
    ),
    Signature(
        name="vllm_banner",
        anchor="  version 0.",
        pattern=r"[^ -~]  version (?P<version>0\.\d[\w.]*)",
        role=Role.START,
        engine="vllm",
        examples=("(APIServer pid=1) INFO 12-01 01:36:07 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0",),
    ),
    Signature(
        name="vllm_init",
        anchor=" LLM engine (v",
        pattern=r"^Initializing an? (?:V\d )?LLM engine \(v(?P<version>\d[\w.]*)\)",
        role=Role.PHASE,
        engine="vllm",
        examples=("(EngineCore pid=3) INFO 12-01 01:36:23 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'",),
    ),
)  # fmt: skip
