"""Host memory: the kernel's OOM killer, user-space ones, SIGKILL, /dev/shm, and plain failed allocations.

Kernel texts: mm/oom_kill.c, 4.x to 6.x. Units of the kernel's kB are 1024 bytes.
"""

from __future__ import annotations

from gpu_oom_exporter.catalog.signatures.signature import SIZE, Role, Signature

_VICTIM = r" process (?P<pid>\d+),? \((?P<task>[^)]*)\)(?:,? (?:UID:? ?\d+,? )?total-vm:\d+kB, anon-rss:(?P<anon_rss_bytes>\d+kB))?"

KERNEL = (
    Signature(
        name="kernel_oom_cgroup",
        anchor="Memory cgroup out of memory: Kill",
        pattern=r"Memory cgroup out of memory: Kill(?:ed)?" + _VICTIM,
        category="host_oom_kill_cgroup",
        examples=(
            "[ 8123.551702] Memory cgroup out of memory: Killed process 69666 (sglang::schedul) total-vm:81238144kB, "
            "anon-rss:15728640kB, file-rss:402112kB, shmem-rss:65536kB, UID:0 pgtables:33120kB oom_score_adj:0",
            "Jan  9 11:20:31 node kernel: Memory cgroup out of memory: Kill process 812 (python3) score 1974 or sacrifice child",
        ),
    ),
    Signature(
        name="kernel_oom_global",
        anchor="Out of memory",
        pattern=r"Out of memory(?: \(oom_kill_allocating_task\))?: Kill(?:ed)?" + _VICTIM,
        category="host_oom_kill_global",
        examples=(
            "Jan  9 11:20:31 node kernel: [81234.120011] Out of memory: Killed process 43876 (VLLM::EngineCor) total-vm:152340992kB, "
            "anon-rss:58720256kB, file-rss:1204kB, shmem-rss:262144kB, UID:1000 pgtables:121004kB oom_score_adj:0",
        ),
        near_misses=("java.lang.Error: Out of memory: Kill it",),
    ),
    Signature(
        name="kernel_victim",
        anchor="Killed process ",
        pattern=r"^Killed" + _VICTIM,
        category="host_oom_kill_global",
        role=Role.DETAIL,
        examples=("[ 81234.1] Killed process 812 (python3) total-vm:152340992kB, anon-rss:58720256kB, file-rss:1204kB, shmem-rss:0kB",),
    ),
    Signature(
        name="kernel_oom_constraint",
        anchor="oom-kill:constraint=",
        pattern=r"oom-kill:constraint=CONSTRAINT_(?P<constraint>\w+),.*?(?:oom_memcg=(?P<cgroup>[^,]+),.*)?task=(?P<task>.{1,32}),pid=(?P<pid>\d+)",
        by=("constraint", {"MEMCG": "host_oom_kill_cgroup"}, "host_oom_kill_global"),
        examples=(
            "[ 8123.551611] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker-7d1c.scope,mems_allowed=0-1,"
            "oom_memcg=/system.slice/docker-7d1c.scope,task_memcg=/system.slice/docker-7d1c.scope,task=python,pid=69666,uid=0",
            "[ 8123.5] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=python,pid=7,uid=0",
        ),
    ),
    Signature(
        name="kernel_oom_invoker",
        anchor=" invoked oom-killer: ",
        pattern=r"^(?P<invoker>\S+) invoked oom-killer: ",
        category="host_oom_kill_global",
        role=Role.DETAIL,
        examples=("[ 8123.551204] sglang::schedul invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",),
    ),
    Signature(
        name="kernel_oom_limit",
        anchor=" killed as a result of limit of ",
        pattern=r"Tasks? in \S+ killed as a result of limit of (?P<cgroup>\S+)",
        category="host_oom_kill_global",
        role=Role.DETAIL,
        examples=("Task in /docker/7d1c killed as a result of limit of /docker/7d1c",),
    ),
    Signature(
        name="systemd_oom_kill",
        anchor="has been killed by the OOM killer",
        pattern=r"(?P<unit>\S+): A process of this unit has been killed by the OOM killer",
        category="host_oom_kill_cgroup",
        examples=("systemd[1]: inference.service: A process of this unit has been killed by the OOM killer.",),
    ),
    Signature(
        name="systemd_result_oom",
        anchor="oom-kill",
        pattern=r"(?P<unit>\S+): Failed with result 'oom-kill'",
        category="host_oom_kill_cgroup",
        examples=("inference.service: Failed with result 'oom-kill'.",),
        near_misses=("inference.service: Failed with result 'timeout'.",),
    ),
    *(
        Signature(
            name=name,
            anchor=anchor,
            pattern=pattern,
            category=category,
            any_level=True,
            examples=(example,),
        )
        for name, category, anchor, pattern, example in (
            ("kubelet_system_oom", "host_oom_kill_global", "System OOM encountered", r"System OOM encountered, victim process: (?P<task>[^,]*), pid: (?P<pid>\d+)", "Warning  SystemOOM  2m  kubelet  System OOM encountered, victim process: python3, pid: 69666"),
            ("docker_event_oom", "host_oom_kill_cgroup", "container oom ", r"^(?:\S+ )?container oom (?P<container>[0-9a-f]{12,64})", "2026-12-01T10:00:00.000000000Z container oom 7d1c0a9b8c7d (image=vllm/vllm-openai, name=vllm)"),
            ("containerd_task_oom", "host_oom_kill_cgroup", "TaskOOM", r"TaskOOM event", 'level=info msg="TaskOOM event container_id:7d1c"'),
            ("slurm_oom_event", "host_oom_kill_cgroup", "oom_kill event", r"Detected (?P<killed_processes>\d+) oom_kill events? in (?:StepId=)?(?P<step>\S+)", "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed."),
            ("slurm_task_oom", "host_oom_kill_cgroup", ": Out Of Memory", r"srun: error: \S+: tasks? \S+: Out Of Memory", "srun: error: gpu7: task 0: Out Of Memory"),
        )
    ),
    Signature(
        name="systemd_oomd_killed",
        anchor="Killed /",
        pattern=r"^Killed (?P<cgroup>/\S+) due to memory (?:pressure|used)",
        category="host_oom_kill_userspace",
        examples=(
            "Dec 18 19:34:56 host systemd-oomd[840]: Killed /user.slice/user-1001.slice/app.slice/vte.scope due to memory pressure for "
            "/user.slice being 51.07% > 50.00% for > 20s with reclaim activity",
        ),
    ),
    Signature(
        name="systemd_oomd_count",
        anchor="systemd-oomd killed ",
        pattern=r"(?P<unit>\S+): systemd-oomd killed (?P<killed_processes>\d+) process",
        category="host_oom_kill_userspace",
        examples=("Dec 18 19:34:56 host systemd[1837]: vte.scope: systemd-oomd killed 12 process(es) in this unit.",),
    ),
    Signature(
        name="earlyoom",
        anchor="sending SIG",
        pattern=r"sending SIG(?:TERM|KILL) to process (?P<pid>\d+) (?:uid \d+ )?.(?P<task>[^\"']+)[\"']:? .*VmRSS (?P<anon_rss_bytes>\d+ MiB)",
        category="host_oom_kill_userspace",
        examples=('earlyoom[712]: sending SIGTERM to process 12345 uid 1000 "python3": badness 812, VmRSS 48123 MiB',),
    ),
    *(
        Signature(
            name=f"oomkilled_{name}",
            anchor="OOMKilled",
            pattern=pattern,
            category="host_oom_kill_cgroup",
            examples=(example,),
            near_misses=near_misses,
        )
        for name, pattern, example, near_misses in (
            ("reason", r"(?i:reason)[\"']?[:=]\s*[\"']?OOMKilled[\"']?\s*(?:$|[,;})])", "      Reason:       OOMKilled", ("the alert KubePodOOMKilled was silenced", "The container ends with reason: OOMKilled when over its limit")),
            ("docker", r"[\"']?OOMKilled[\"']?\s*[:=]\s*true", '            "OOMKilled": true,', ('            "OOMKilled": false,',)),
            ("pods", r"^(?:(?P<namespace>\S+) +)?(?P<pod>\S+) +\d+/\d+ +(?:Init:)?OOMKilled\b", "vllm-0                 0/1     OOMKilled   3 (40s ago)   5m", ()),
        )
    ),
    *(
        Signature(
            name=f"exit_code_{name}",
            anchor=anchor,
            pattern=rf"(?:^|[,{{] ?)[\"']?{words}[\"']?:\s*(?P<exit_code>\d+)",
            category="host_oom_kill_cgroup",
            role=Role.DETAIL,
            examples=(example,),
        )
        for name, anchor, words, example in (
            ("described", "Exit Code: ", "Exit Code", "      Exit Code:    137"),
            ("inspected", "xitCode", "[Ee]xitCode", '            "ExitCode": 137,'),
        )
    ),
)  # fmt: skip

KILLED = (
    Signature(
        name="exit_code_minus_9",
        anchor="xit code: -9",
        pattern=r"(?:Worker proc (?P<worker>\S+)|[Ww]orker|[Pp]rocess|proc|[Ss]cheduler|VllmWorkerProcess)(?:.*?\bpid[ =](?P<pid>\d+)\b)?.*[Ee]xit code: (?P<exit_code>-9)\b",
        category="worker_sigkilled",
        examples=(
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            "ERROR 07-01 13:54:43 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 1159 died, exit code: -9",
        ),
        near_misses=("ERROR 07-01 13:54:43 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 1159 died, exit code: -6",),
    ),
    Signature(
        name="exitcode_minus_9",
        anchor="xitcode: -9",
        pattern=r"failed \(exitcode: (?P<exit_code>-9)\)(?: local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\))?",
        category="worker_sigkilled",
        examples=("E1201 10:00:00.1 139 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3",),
    ),
    Signature(
        name="exit_code_word_minus_9",
        anchor="xit code -9",
        pattern=r"(?:[Pp]rocess|[Ww]orker|[Ss]cheduler|[Cc]hild|[Rr]ank)\b.*[Ee]xit code (?P<exit_code>-9)\b",
        category="worker_sigkilled",
        examples=("A child process terminated with exit code -9.",),
    ),
    Signature(
        name="exit_code_line_minus_9",  # SGLang, the line after "scheduler is dead"
        anchor="Exit code: -9",
        pattern=r"^Exit code: (?P<exit_code>-9)\b",
        category="worker_sigkilled",
        examples=("[12-16 14:27:10] Exit code: -9",),
    ),
    Signature(
        name="torch_spawn_sigkill",
        anchor="terminated with signal SIGKILL",
        pattern=r"process \d+ terminated with signal SIGKILL",
        category="worker_sigkilled",
        fields={"signal": 9},
        examples=("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",),
    ),
    Signature(
        name="torchrun_signal_9",
        anchor="Signal 9 (SIGKILL) received by PID",
        pattern=r"Signal (?P<signal>9) \(SIGKILL\) received by PID (?P<pid>\d+)",
        category="worker_sigkilled",
        examples=("  traceback : Signal 9 (SIGKILL) received by PID 4242",),
    ),
    *(
        Signature(
            name=name,
            anchor=anchor,
            pattern=pattern,
            category="worker_sigkilled",
            any_level=True,
            fields={"signal": 9},
            examples=(example,),
        )
        for name, anchor, pattern, example in (
            ("supervisord_sigkill", "terminated by SIGKILL", r"exited: (?P<worker>\S+) \(terminated by SIGKILL; not expected\)", "2026-12-01 10:00:00,123 WARN exited: vllm (terminated by SIGKILL; not expected)"),
            ("pm2_sigkill", "via signal [SIGKILL]", r"App \[(?P<worker>[^\]]+)\] exited with code \[\d+\] via signal \[SIGKILL\]", "PM2        | App [vllm:0] exited with code [0] via signal [SIGKILL]"),
        )
    ),
    Signature(
        name="mpirun_signal_9",
        anchor="exited on signal 9",
        pattern=r"rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited on signal (?P<signal>9)\b",
        category="worker_sigkilled",
        examples=("mpirun noticed that process rank 0 with PID 4242 on node gpu1 exited on signal 9 (Killed).",),
    ),
    Signature(
        name="dataloader_killed",
        anchor="is killed by signal: Killed",
        pattern=r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d+)\) is killed by signal: Killed",
        category="worker_sigkilled",
        fields={"signal": 9},
        examples=("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.",),
    ),
    Signature(
        name="gunicorn_sigkill",
        anchor="was sent SIGKILL! Perhaps out of memory",
        pattern=r"Worker \(pid:(?P<pid>\d+)\) was sent SIGKILL! Perhaps out of memory",
        category="worker_sigkilled",
        fields={"signal": 9},
        examples=("[2026-01-01 00:00:00 +0000] [7] [ERROR] Worker (pid:4242) was sent SIGKILL! Perhaps out of memory?",),
    ),
)  # fmt: skip

SHARED = (
    Signature(
        name="nccl_shm_segment",
        anchor="Error while creating shared memory segment",
        pattern=r"Error while creating shared memory segment (?P<segment>\S+) \(size (?P<requested_bytes>\d+)\)",
        category="shm_exhausted",
        units={"requested_bytes": "bytes"},
        examples=("gpu-node:221:221 [0] misc/shmutils.cc:113 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x3Tq9a (size 7340384)",),
    ),
    Signature(
        name="nccl_shm_extend",
        anchor="failed to extend /dev/shm",
        pattern=r"failed to extend (?P<segment>/dev/shm/\S+) to (?P<requested_bytes>\d+) bytes",
        category="shm_exhausted",
        units={"requested_bytes": "bytes"},
        weak=True,
        examples=("gpu-node:221:221 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x3Tq9a to 7340388 bytes",),
    ),
    Signature(
        name="nccl_posix_fallocate",
        anchor="posix_fallocate failed",
        pattern=r"shm\w*\.(?:h|cc):\d+ NCCL WARN Call to posix_fallocate failed ?: No space left on device",
        category="shm_exhausted",
        examples=("host7:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",),
    ),
    Signature(
        name="torch_shm_mmap",
        anchor="unable to mmap ",
        pattern=r"unable to mmap (?P<requested_bytes>\d+) bytes from file [<\"' ]{0,3}/torch_\S*: (?:Cannot allocate memory|No space left on device)",
        category="shm_exhausted",
        units={"requested_bytes": "bytes"},
        examples=("RuntimeError: unable to mmap 31240 bytes from file </torch_11876_2718281828_60133>: Cannot allocate memory (12)",),
    ),
    Signature(
        name="torch_file_mmap",
        anchor="unable to mmap ",
        pattern=r"unable to mmap (?P<requested_bytes>\d+) bytes from file [<\"' ]{0,3}(?:/[^t/\s]|/t[^o\s]|/to[^r\s]|/tor[^c\s]|/torc[^h\s]|/torch[^_\s]|[\w.])\S*: Cannot allocate memory",
        category="host_alloc_failure",
        units={"requested_bytes": "bytes"},
        examples=("RuntimeError: unable to mmap 18771240960 bytes from file </models/codellama-34b-gptq/model.safetensors>: Cannot allocate memory (12)",),
        near_misses=("RuntimeError: unable to mmap 31240 bytes from file </torch_11876_2718281828_60133>: Cannot allocate memory (12)",),
    ),
    Signature(
        name="torch_shm_file",
        anchor="/torch_",
        pattern=r"unable to (?:allocate shared memory\(shm\) for file|write to file|resize file|open shared memory object|open file) [<\"' ]{0,3}/torch_.*(?:No space left on device|Cannot allocate memory)",
        category="shm_exhausted",
        examples=("RuntimeError: unable to write to file </torch_61_1_0>: No space left on device (28)",),
        near_misses=("RuntimeError: unable to open shared memory object </torch_61_1_0> in read-write mode: Too many open files (24)",),
    ),
    Signature(
        name="dev_shm_full",
        anchor="/dev/shm",
        pattern=r"\[Errno (?P<errno>28|12)\] (?:No space left on device|Cannot allocate memory): [\"']?(?P<segment>/dev/shm[^\"'\s]*)",
        category="shm_exhausted",
        examples=("OSError: [Errno 28] No space left on device: '/dev/shm/psm_5a7f'",),
    ),
    Signature(
        name="dataloader_sigbus",
        anchor="is killed by signal: Bus error",
        pattern=r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d+)\) is killed by signal: Bus error",
        category="shm_exhausted",
        examples=("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",),
    ),
    Signature(
        name="dataloader_bus_error",
        anchor="Unexpected bus error encountered in worker",
        pattern=r"Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory",
        category="shm_exhausted",
        examples=("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",),
    ),
    Signature(
        name="worker_sigbus",
        anchor="xit code: -7",
        pattern=r"(?:[Ww]orker|[Pp]rocess|proc|[Ss]cheduler).*[Ee]xit code: (?P<exit_code>-7)\b",
        category="shm_exhausted",
        examples=("ERROR 07-01 13:54:43 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 1159 died, exit code: -7",),
    ),
)  # fmt: skip

HOST = (
    Signature(
        name="torch_cpu_allocator",
        anchor="DefaultCPUAllocator: ",
        pattern=r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<requested_bytes>\d+) bytes",
        category="host_alloc_failure",
        units={"requested_bytes": "bytes"},
        examples=('RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9663676416 bytes. Error code 12 (Cannot allocate memory)',),
    ),
    Signature(
        name="errno_12",
        anchor="[Errno 12] Cannot allocate memory",
        pattern=r"\[Errno (?P<errno>12)\] Cannot allocate memory(?:$|[^:]|: [\"'](?:[^/]|/[^d]|/d[^e]))",
        category="host_alloc_failure",
        examples=("OSError: [Errno 12] Cannot allocate memory",),
        near_misses=("redis.exceptions.ResponseError: MISCONF [Errno 12] Cannot allocate memory: '/dev/shm/x'",),
    ),
    Signature(
        name="mmap_failed",
        anchor=" failed: Cannot allocate memory",
        pattern=r"(?:mmap|malloc|posix_memalign|mremap) failed: Cannot allocate memory",
        category="host_alloc_failure",
        examples=("llama_model_load: error loading model: mmap failed: Cannot allocate memory",),
    ),
    Signature(
        name="numpy_memory_error",
        anchor="ArrayMemoryError: Unable to allocate",
        pattern=rf"ArrayMemoryError: Unable to allocate (?P<requested_bytes>{SIZE})",
        category="host_alloc_failure",
        examples=("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",),
    ),
    Signature(
        name="bad_alloc",
        anchor="std::bad_alloc",
        pattern=r"(?:what\(\): +|instance of '|: |^)std::bad_alloc(?:'|$|[\s,.;)\"])",
        category="host_alloc_failure",
        examples=("0.02.853.935 E llama_init_from_model: failed to initialize the context: std::bad_alloc",),
        near_misses=("    } catch (const std::bad_alloc & e) {", "#5 0x00007f in std::bad_alloc::~bad_alloc() () from libstdc++.so", "  - std::bad_alloc"),
    ),
    Signature(
        name="ggml_host_malloc",
        anchor="insufficient memory (attempted to allocate",
        pattern=rf"insufficient memory \(attempted to allocate +(?P<requested_bytes>{SIZE})\)",
        category="host_alloc_failure",
        engine="llamacpp",
        examples=("0.00.268.412 E ggml_aligned_malloc: insufficient memory (attempted to allocate 1953.12 MB)",),
    ),
    Signature(
        name="ggml_cpu_buffer",
        anchor="failed to allocate CPU buffer of size",
        pattern=r"failed to allocate CPU buffer of size (?P<requested_bytes>\d+)",
        category="host_alloc_failure",
        engine="llamacpp",
        units={"requested_bytes": "bytes"},
        weak=True,
        examples=("ggml_backend_buft_alloc_buffer_n_default: failed to allocate CPU buffer of size 2048000000",),
    ),
    Signature(
        name="ggml_cpu_backend",
        anchor="ggml_backend_cpu_buffer_type_alloc_buffer",
        pattern=r"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size (?P<requested_bytes>\d+)",
        category="host_alloc_failure",
        engine="llamacpp",
        units={"requested_bytes": "bytes"},
        weak=True,
        examples=("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 2048000000",),
    ),
)  # fmt: skip
