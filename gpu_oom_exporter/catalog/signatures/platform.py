"""The driver, container runtimes, Kubernetes, and what stands around an engine."""

from __future__ import annotations

from gpu_oom_exporter.catalog.signatures.signature import PCI, Role, Signature
from gpu_oom_exporter.catalog.xids import XID_CATEGORY, XID_OTHER

_XID = rf"(?:(?:^|[\]:|] )NVRM: |^)Xid \((?:PCI:)?(?P<pci>{PCI})(?: GPU-I:(?P<mig_gi>\d+))?\): "

DRIVER = (
    Signature(
        name="xid",
        anchor="Xid (",
        pattern=_XID
        + r"(?P<xid>\d|[0-9]\d|1[0-46-9]\d|15[0-35-9]|[2-9]\d\d)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?:, name=(?P<process>[^,<]+))?(?:,|$|[ <])",
        by=("xid", XID_CATEGORY, XID_OTHER),
        examples=(
            "[ 84.731000] NVRM: Xid (PCI:0000:c1:00): 119, pid=6049, name=nvidia-persiste, Timeout after 45s of waiting for RPC response",
            "NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d 00000104 00000000 00000100",
            "NVRM: Xid (PCI:0000:41:00 GPU-I:03): 31, pid=77, name=python, Ch 00000008",
            "[88001.000001] NVRM: Xid (PCI:0000:17:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC error",
        ),
        near_misses=("the runbook says: Xid 79 means power cycle", "kernel log shows NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x"),
    ),
    Signature(
        name="xid_recovery_action",
        anchor="Xid (",
        pattern=_XID + r"(?P<xid>154)(?:, pid=[^,]*)?(?:, name=[^,]*)?, GPU recovery action changed from .* to 0x[1-9a-f][0-9a-f]* \((?P<recovery_action>[^)]*)\)",
        category="gpu_recovery_required",
        examples=("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",),
        near_misses=("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",),
    ),
    Signature(
        name="device_plugin_xid",
        anchor="XidCriticalError: Xid=",
        pattern=r"XidCriticalError: Xid=(?P<xid>\d{1,3}) on Device=(?P<device>[\w-]+)",
        by=("xid", XID_CATEGORY, XID_OTHER),
        examples=("XidCriticalError: Xid=79 on Device=GPU-5a7f, the device will go unhealthy.",),
    ),
    Signature(
        name="fallen_off_the_bus",
        anchor="fallen off the bus",
        pattern=rf"NVRM: (?:GPU (?:at )?(?:PCI:)?(?P<pci>{PCI}): )?(?:GPU has |The GPU has )?fallen off the bus",
        category="gpu_lost",
        examples=("[ 1843.3] NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", "NVRM: fallen off the bus and is not responding to commands."),
        near_misses=("forum title: my GPU has fallen off the bus",),
    ),
    Signature(
        name="fallen_gpu",
        anchor="NVRM: The NVIDIA GPU",
        pattern=rf"NVRM: The NVIDIA GPU (?P<pci>{PCI})",
        category="gpu_lost",
        role=Role.DETAIL,
        examples=("[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",),
    ),
    Signature(
        name="gpu_is_lost",
        anchor="GPU is lost",
        pattern=rf"(?:nvml\.Device (?P<gpu>\d+): )?(?:nvml: |GPU ?(?P<pci>{PCI}): |NVML: |Error: )GPU is lost",
        category="gpu_lost",
        examples=(
            "error creating nvml.Device 3: nvml: GPU is lost",
            "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU",
        ),
    ),
    Signature(
        name="pynvml_gpu_is_lost",
        anchor="GpuIsLost",
        pattern=r"NVMLError_GpuIsLost",
        category="gpu_lost",
        examples=("pynvml.NVMLError_GpuIsLost: GPU is gone",),
    ),
    Signature(
        name="nvrm_no_memory",
        anchor="NV_ERR_NO_MEMORY",
        pattern=r"NVRM: .*(?P<status>NV_ERR_NO_MEMORY)",
        category="nvrm_alloc_failure",
        examples=("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal(pMemDesc)",),
    ),
    Signature(
        name="drm_fallback",
        anchor="trying to fall back to sysmem",
        pattern=r"\[nvidia-drm\].*trying to fall back to sysmem",
        category="display_vram_pressure",
        examples=("[  276.8] [drm] [nvidia-drm] [GPU ID 0x00000100] Failed to allocate NVKMS video memory for GEM object, trying to fall back to sysmem",),
    ),
    Signature(
        name="reset_blocked",
        anchor="is currently in use by another process",
        pattern=rf"GPU (?P<pci>{PCI}) is currently in use by another process",
        category="gpu_reset_blocked",
        examples=("GPU 00000000:C1:00.0 is currently in use by another process.",),
    ),
    Signature(
        name="reset_blocked_client",
        anchor=": In use by another client",
        pattern=rf"GPU (?P<pci>{PCI}): In use by another client",
        category="gpu_reset_blocked",
        examples=("  GPU 00000000:1A:00.0: In use by another client",),
    ),
)  # fmt: skip

CONTAINERS = (
    Signature(
        name="docker_gpus_flag",
        anchor="--gpus",
        pattern=r"unknown (?:flag|option|shorthand flag):? '?--gpus",
        category="docker_gpus_flag_unsupported",
        examples=("unknown flag: --gpus", "docker: unknown option --gpus"),
        near_misses=("docker run --gpus all image",),
    ),
    Signature(
        name="no_device_driver",
        anchor="could not select device driver",
        pattern=r"could not select device driver \S* ?with capabilities: \[\[.*gpu",
        category="container_toolkit_missing",
        examples=(
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            'Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]',
        ),
        near_misses=('could not select device driver "nfs" with capabilities: [[volume]]',),
    ),
    Signature(
        name="runtime_hook_missing",
        anchor="executable file not found",
        pattern=r"exec: \"?nvidia-container-(?:runtime|runtime-hook|cli|toolkit)\"?: executable file not found",
        category="container_toolkit_missing",
        examples=('failed to create shim task: OCI runtime create failed: exec: "nvidia-container-runtime-hook": executable file not found in $PATH',),
    ),
    *(
        Signature(
            name=f"runtime_{name}",
            anchor=anchor,
            pattern=pattern,
            category="nvidia_runtime_not_registered",
            examples=(example,),
        )
        for name, anchor, pattern, example in (
            ("unknown", "unknown or invalid runtime name", r"unknown or invalid runtime name:? \"?(?P<runtime>nvidia[\w-]*)", "docker: Error response from daemon: unknown or invalid runtime name: nvidia."),
            ("old_unknown", "Unknown runtime specified", r"Unknown runtime specified (?P<runtime>nvidia[\w-]*)", "docker: Error response from daemon: Unknown runtime specified nvidia."),
            ("none", "no runtime for ", r"no runtime for [\\\"]*(?P<runtime>nvidia[\w-]*)[\\\"]* is configured", 'failed to get sandbox runtime: no runtime for "nvidia" is configured'),
            ("handler", "ind runtime handler", r"find runtime handler [\\\"]*(?P<runtime>nvidia[\w-]*)[\\\"]* from runtime list", "rpc error: code = Unknown desc = failed to find runtime handler nvidia from runtime list map[runc:0xc0]"),
        )
    ),
    *(
        Signature(
            name=f"driver_{name}",
            anchor=anchor,
            pattern=pattern,
            category=category,
            fields=fields,
            examples=(example,),
        )
        for name, category, anchor, pattern, fields, example in (
            ("condition", "container_driver_too_old", "unsatisfied condition: ", r"unsatisfied condition: .*?cuda ?>=? ?(?P<required_cuda>[\d.]*\d)", {}, "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver to a newer version"),
            ("torch_old", "container_driver_too_old", "driver on your system is too old", r"NVIDIA driver on your system is too old", {}, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
            ("insufficient", "container_driver_too_old", "CUDA driver version is insufficient", r"CUDA driver version is insufficient for CUDA runtime version", {}, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version"),
            ("not_loaded", "nvidia_driver_not_loaded", "driver not loaded", r"(?:nvml error|NVML): driver not loaded", {}, "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown."),
            ("nvml_not_loaded", "nvidia_driver_not_loaded", "Driver Not Loaded", r"(?:NVML|NVMLError\w*):? Driver Not Loaded", {}, "pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded"),
            ("smi_not_loaded", "nvidia_driver_not_loaded", "communicate with the NVIDIA driver", r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", {}, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."),
            ("mismatch", "driver_library_mismatch", "library version mismatch", r"[Dd]river/library version mismatch", {}, "Failed to initialize NVML: Driver/library version mismatch"),
            ("api_mismatch", "driver_library_mismatch", "API mismatch: the client has", r"NVRM: API mismatch: the client has(?: the)? version (?P<library_version>[\d.]*\d)", {}, "[ 1843.3] NVRM: API mismatch: the client has the version 570.86.15, but this kernel module has the version 570.133.20."),
            ("access_lost", "container_gpu_access_lost", "Failed to initialize NVML: Unknown Error", r"Failed to initialize NVML: Unknown Error", {}, "Failed to initialize NVML: Unknown Error"),
            ("fabric", "fabric_manager_not_ready", "system not yet initialized", r"system not yet initialized", {"cuda_error": 802}, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
            ("fabric_name", "fabric_manager_not_ready", "_SYSTEM_NOT_READY", r"CUDA_ERROR_SYSTEM_NOT_READY", {"cuda_error": 802}, "cuInit failed: CUDA_ERROR_SYSTEM_NOT_READY"),
            ("fabric_enum", "fabric_manager_not_ready", "cudaErrorSystemNotReady", r"cudaErrorSystemNotReady", {"cuda_error": 802}, "got cudaErrorSystemNotReady"),
        )
    ),
    Signature(
        name="library_version",
        anchor="NVML library version: ",
        pattern=r"^NVML library version: (?P<library_version>[\d.]*\d)",
        category="driver_library_mismatch",
        role=Role.DETAIL,
        examples=("NVML library version: 570.86",),
    ),
    Signature(
        name="k8s_admission",
        anchor="UnexpectedAdmissionError",
        pattern=r"UnexpectedAdmissionError",
        category="k8s_gpu_unavailable",
        examples=("Reason:            UnexpectedAdmissionError",),
    ),
    Signature(
        name="k8s_devices",
        anchor=" nvidia.com/",
        pattern=r"number of devices unavailable for nvidia\.com/[\w.-]+\. Requested: ?(?P<requested>\d+), Available: ?(?P<available>\d+)",
        category="k8s_gpu_unavailable",
        examples=("Message:         Pod Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested:1, Available: 0, which is unexpected",),
        near_misses=("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",),
    ),
)  # fmt: skip

AROUND = (
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
            ("nginx_refused", "proxy_upstream_not_ready", "while connecting to upstream", r"connect\(\) failed \(111: Connection refused\) while connecting to upstream.*upstream: \"(?P<upstream>[^\"]+)\"", '2026/03/01 10:11:12 [error] 29#29: *104 connect() failed (111: Connection refused) while connecting to upstream, client: 10.0.0.9, server: _, request: "POST /v1/chat/completions HTTP/1.1", upstream: "http://127.0.0.1:8000/v1/chat/completions", host: "llm.example"'),
            ("nginx_no_live", "proxy_upstream_not_ready", "no live upstreams while connecting", r"no live upstreams while connecting to upstream.*upstream: \"(?P<upstream>[^\"]+)\"", '2026/03/01 10:11:12 [error] 29#29: *105 no live upstreams while connecting to upstream, client: 10.0.0.9, server: _, request: "POST /v1/completions HTTP/1.1", upstream: "http://llm/v1/completions", host: "llm.example"'),
            ("nginx_closed", "proxy_upstream_died", "upstream prematurely closed connection", r"upstream prematurely closed connection.*upstream: \"(?P<upstream>[^\"]+)\"", '2026/03/01 10:40:02 [error] 29#29: *331 upstream prematurely closed connection while reading response header from upstream, client: 10.0.0.9, server: _, request: "POST /v1/completions HTTP/1.1", upstream: "http://172.18.0.3:8000/v1/completions", host: "llm.example"'),
            ("nginx_reset", "proxy_upstream_died", "Connection reset by peer) while reading", r"recv\(\) failed \(104: Connection reset by peer\) while reading .*upstream.*upstream: \"(?P<upstream>[^\"]+)\"", '2026/03/01 10:40:02 [error] 29#29: *332 recv() failed (104: Connection reset by peer) while reading response header from upstream, client: 10.0.0.9, server: _, request: "POST /v1/completions HTTP/1.1", upstream: "http://172.18.0.3:8000/v1/completions", host: "llm.example"'),
            ("go_refused", "proxy_upstream_not_ready", "connect: connection refused", r"(?:reverse_proxy|Bad Gateway|http\.log\.error).*dial tcp (?P<upstream>[\w.:\[\]-]+): connect: connection refused", "level=debug msg=\"'502 Bad Gateway' caused by: dial tcp 10.0.0.5:8000: connect: connection refused\""),
            ("traefik_eof", "proxy_upstream_died", "Bad Gateway", r"502 Bad Gateway' caused by: (?:EOF|read tcp .*connection reset by peer)", "level=debug msg=\"'502 Bad Gateway' caused by: EOF\""),
            ("haproxy_down", "proxy_upstream_not_ready", " is DOWN, reason: Layer4", r"Server \S+ is DOWN, reason: Layer4 connection problem", '[WARNING]  (301) : Server vllm_pool/vllm2 is DOWN, reason: Layer4 connection problem, info: "Connection refused", check duration: 0ms.'),
            ("envoy_failure", "proxy_upstream_not_ready", "before headers. ", r"upstream connect error or disconnect/reset before headers\. .*(?:connection failure|Connection refused)", "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, transport failure reason: delayed connect error: Connection refused"),
            ("envoy_termination", "proxy_upstream_died", "before headers. ", r"upstream connect error or disconnect/reset before headers\. .*connection termination", "upstream connect error or disconnect/reset before headers. reset reason: connection termination"),
            ("apache_refused", "proxy_upstream_not_ready", "(111)Connection refused", r"\(111\)Connection refused: AH00957: \w+: attempt to connect to (?P<upstream>\S+)", "[proxy:error] [pid 7] (111)Connection refused: AH00957: HTTP: attempt to connect to 127.0.0.1:8000 (127.0.0.1) failed"),
            ("ssh_publickey", "ssh_publickey_denied", "Permission denied (", r"(?:^|[ \"'])(?:[^\s@\"']+@)?(?P<host>[\w.:-]+): Permission denied \([^)]*publickey", "ubuntu@203.0.113.7: Permission denied (publickey)."),
        )
    ),
)  # fmt: skip
