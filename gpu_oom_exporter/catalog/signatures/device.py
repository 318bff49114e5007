"""GPU memory as PyTorch, CUDA and their libraries report it.

Texts of the PyTorch allocator by version: c10/cuda/CUDACachingAllocator.cpp, 1.13 to 2.15.
"""

from __future__ import annotations

from gpu_oom_exporter.catalog.signatures.signature import SIZE, Role, Signature

_PROCESSES = rf"(?: Process \d+ has {SIZE} memory in use\.| Including non-PyTorch memory, this process has {SIZE} memory in use\.)*"

DEVICE = (
    Signature(
        name="torch_oom",
        anchor="out of memory. Tried to allocate ",
        pattern=rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<tried_bytes>{SIZE})\."
        rf"(?: GPU (?P<gpu>\d+) has a total capaci?ty of (?P<total_bytes>{SIZE}) of which (?P<free_bytes>{SIZE}) is free\."
        rf"(?P<processes>{_PROCESSES})(?: (?P<allowed_bytes>{SIZE}) allowed;)?"
        rf"(?: Of the allocated memory (?P<allocated_bytes>{SIZE}) is allocated by PyTorch,"
        rf"(?: with (?P<private_pool_bytes>{SIZE}) allocated in private pools \([^)]*\),)?"
        rf" and (?P<reserved_unallocated_bytes>{SIZE}) is reserved by PyTorch but unallocated)?)?",
        category="cuda_oom_generic",
        examples=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of "
            "79.11 GiB of which 12.81 MiB is free. Including non-PyTorch memory, this process has 79.09 GiB memory in use. "
            "Of the allocated memory 77.31 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., "
            "CUDA Graphs), and 214.55 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large",
            "OutOfMemoryError('CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacty of 44.35 GiB of "
            "which 12.31 MiB is free. Process 7 has 44.33 GiB memory in use. Of the allocated memory 43.60 GiB is allocated "
            "by PyTorch, and 108.11 MiB is reserved by PyTorch but unallocated.')",
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 1 has a total capacity of 191.69 GiB "
            "of which 0 bytes is free. 95.00 GiB allowed; Of the allocated memory 94.10 GiB is allocated by PyTorch, and "
            "1.00 KiB is reserved by PyTorch but unallocated.",
        ),
        near_misses=(
            "INFO 07-15 10:00:01 [logger.py:43] Received request chatcmpl-1: prompt: 'CUDA out of memory. Tried to allocate "
            "2.00 GiB. Why?', params: SamplingParams(n=1)",
            '    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
            '127.0.0.1 - - [01/Dec/2026:10:00:00 +0000] "GET /search?q=CUDA out of memory. Tried to allocate 2 GiB. HTTP/1.1" 200',
            "$ grep -c 'CUDA out of memory. Tried to allocate 2.00 GiB.' server.log",
        ),
    ),
    Signature(
        name="torch_oom_1x",
        anchor="out of memory. Tried to allocate ",
        pattern=rf"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<tried_bytes>{SIZE}) \(GPU (?P<gpu>\d+); "
        rf"(?P<total_bytes>{SIZE}) total capacity; (?P<allocated_bytes>{SIZE}) already allocated; (?P<free_bytes>{SIZE}) free; "
        rf"(?:(?P<allowed_bytes>{SIZE}) allowed; )?(?P<reserved_bytes>{SIZE}) (?:reserved in total by PyTorch|cached)",
        category="cuda_oom_generic",
        examples=(
            "RuntimeError: CUDA out of memory. Tried to allocate 1.12 GiB (GPU 1; 23.69 GiB total capacity; 20.10 GiB already "
            "allocated; 731.56 MiB free; 21.51 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory",
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 7.79 GiB total capacity; "
            "3.10 GiB already allocated; 2.00 GiB free; 3.50 GiB allowed; 3.49 GiB reserved in total by PyTorch)",
        ),
        near_misses=(
            "{\"event\": \"chat\", \"content\": \"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB "
            "total capacity; 22.10 GiB already allocated; 1.00 GiB free; 22.50 GiB reserved in total by PyTorch)\"}",
        ),
    ),
    Signature(
        name="torch_oom_absurd",
        anchor="Tried to allocate more than 1EB",
        pattern=r"(?:CUDA|HIP) out of memory\. Tried to allocate more than 1EB memory",
        category="cuda_oom_generic",
        examples=("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",),
    ),
    Signature(
        name="torch_oom_fraction",
        anchor="exceed per_process_memory_fraction limit",
        pattern=r"out of memory\. Allocation was preemptively rejected because it would exceed per_process_memory_fraction"
        rf" limit\.(?: Requested size: (?P<tried_bytes>{SIZE}|\d+))?",
        category="cuda_oom_fraction_limit",
        examples=(
            "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 2.00 GiB",
        ),
    ),
    Signature(
        name="malloc_async_oom",
        anchor="would exceed allowed memory. (out of memory)",
        pattern=r"Allocation on device (?P<gpu>\d+) would exceed allowed memory\. \(out of memory\)"
        rf"(?:\\nCurrently allocated +: (?P<allocated_bytes>{SIZE})\\nRequested +: (?P<tried_bytes>{SIZE})"
        rf"\\nDevice limit +: (?P<total_bytes>{SIZE})\\nFree \(according to CUDA\) *: (?P<free_bytes>{SIZE})"
        rf"(?:\\nPyTorch limit \(set by user-supplied memory fraction\)\\n +: (?P<allowed_bytes>{SIZE}))?)?",
        category="cuda_oom_generic",
        examples=(
            "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
            r"""Error: Warmup(Generation("Allocation on device 1 would exceed allowed """
            r"""memory. (out of memory)\nCurrently allocated     : 16.08 GiB\nRequested               : 4.83 GiB\nDevice limit"""
            r"""            : 22.20 GiB\nFree (according to CUDA): 11.12 MiB\nPyTorch limit (set by user-supplied memory fraction)"""
            r"""\n                        : 22.20 GiB"))""",
        ),
    ),
    *(
        Signature(
            name=f"malloc_async_{name}",
            anchor=text,
            pattern=rf"^{pattern}: (?P<{name}_bytes>{SIZE})$",
            category="cuda_oom_generic",
        role=Role.DETAIL,
            examples=(example,),
            near_misses=(f"the table says {example} or so",),
        )
        for name, text, pattern, example in (
            ("allocated", "Currently allocated  ", "Currently allocated +", "Currently allocated     : 9.64 GiB"),
            ("tried", "Requested      ", "Requested +", "Requested               : 1.49 MiB"),
            ("total", "Device limit      ", "Device limit +", "Device limit            : 39.39 GiB"),
            ("free", "Free (according to CUDA)", r"Free \(according to CUDA\) *", "Free (according to CUDA): 3.06 MiB"),
            ("allowed", "                    : ", "", "                        : 39.39 GiB"),
        )
    ),
    Signature(
        name="cuda_error_oom",
        anchor="error: out of memory",
        pattern=r"(?:CUDA|CUDART|HIP|hip|ROCm|MUSA) (?:driver )?error: out of memory",
        category="cuda_oom_generic",
        examples=(
            "torch.AcceleratorError: CUDA error: out of memory",
            "RuntimeError: CUDA error: out of memory",
            "CUDA error: out of memory",
            "ROCm error: out of memory",
        ),
        near_misses=("INFO 01-01 00:00:00 [x.py:1] see the FAQ entry about CUDA error: out of memory",),
    ),
    Signature(
        name="cuda_error_name_oom",
        anchor="CUDA_ERROR_OUT_OF_MEMORY",
        pattern=rf"(?:failed to allocate (?P<tried_bytes>{SIZE})(?: \(\d+ bytes\))? from device: )?CUDA_ERROR_OUT_OF_MEMORY",
        category="cuda_oom_generic",
        examples=(
            "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
            "cuda_driver.cc:1078] failed to allocate 2.00GiB (2147483648 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        ),
        near_misses=("    if status == CUDA_ERROR_OUT_OF_MEMORY:",),
    ),
    Signature(
        name="cuda_runtime_error_name_oom",
        anchor="cudaErrorMemoryAllocation",
        pattern=r"cudaErrorMemoryAllocation",
        category="cuda_oom_generic",
        examples=("cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorMemoryAllocation: out of memory",),
        near_misses=("    except cudaErrorMemoryAllocation:",),
    ),
    Signature(
        name="hip_error_name_oom",
        anchor="hipErrorOutOfMemory",
        pattern=r"hipErrorOutOfMemory",
        category="cuda_oom_generic",
        examples=("RuntimeError: hipErrorOutOfMemory",),
    ),
    Signature(
        name="cupy_oom",
        anchor="Out of memory allocating ",
        pattern=r"OutOfMemoryError: Out of memory allocating (?P<tried_bytes>[\d,]+ bytes)",
        category="cuda_oom_generic",
        examples=("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 512 bytes).",),
    ),
    Signature(
        name="xla_oom",
        anchor="RESOURCE_EXHAUSTED: Out of memory",
        pattern=r"RESOURCE_EXHAUSTED: Out of memory (?:while trying to allocate|allocating) (?P<tried_bytes>\d+(?:\.\d+)? ?(?:bytes|[KMGT]i?B))",
        category="cuda_oom_generic",
        examples=("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",),
    ),
    Signature(
        name="quoted_cuda_error_oom",
        anchor="Cuda error ",
        pattern=r"Cuda error \S+ 'out of memory'",
        category="cuda_oom_generic",
        examples=("Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'out of memory'",),
    ),
    Signature(
        name="mapping_failed_oom",
        anchor="memory mapping failed with OOM",
        pattern=r"expandable_segments: memory mapping failed with OOM on device (?P<gpu>\d+)",
        category="cuda_oom_generic",
        examples=("RuntimeError: expandable_segments: memory mapping failed with OOM on device 0",),
    ),
    Signature(
        name="cumem_oom",
        anchor="CUDA Error: out of memory at",
        pattern=r"CUDA Error: out of memory at \S*cumem_allocator\S*",
        category="cuda_oom_sleep_wake",
        phase="wake",
        examples=("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",),
    ),
    Signature(
        name="cumem_invalid_argument",
        anchor="CUDA Error: invalid argument at",
        pattern=r"CUDA Error: invalid argument at \S*cumem_allocator\S*",
        category="cuda_oom_sleep_wake",
        role=Role.DETAIL,
        examples=("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:119",),
    ),
    Signature(
        name="library_alloc_failed",
        anchor="_STATUS_ALLOC_FAILED",
        pattern=r"(?P<library>CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED",
        category="cuda_oom_library",
        examples=("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",),
        near_misses=("    CUBLAS_STATUS_ALLOC_FAILED = 3",),
    ),
    Signature(
        name="nccl_oom",
        anchor="Cuda failure ",
        pattern=r"Cuda failure (?:\d+ )?'out of memory'",
        category="cuda_oom_library",
        fields={"library": "nccl"},
        examples=(
            "gpu-node:221:402 [1] include/alloc.h:112 NCCL WARN Cuda failure 2 'out of memory'",
            "node:1:2 [0] init.cc:300 NCCL WARN Cuda failure 'out of memory'",
        ),
        near_misses=("node:1:2 [0] init.cc:300 NCCL WARN Cuda failure 'peer access is not supported between these two devices'",),
    ),
    Signature(
        name="torch_nvml_assert",
        anchor="NVML_SUCCESS == ",
        pattern=r"NVML_SUCCESS == \S+ INTERNAL ASSERT FAILED at .*CUDACachingAllocator",
        category="cuda_oom_library",
        fields={"library": "pytorch_nvml_assert"},
        examples=(
            'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report',
        ),
    ),
    Signature(
        name="expandable_segments_pool",
        anchor="Expandable segments are not compatible with memory pool",
        pattern=r"Expandable segments are not compatible with memory pool",
        category="allocator_config_conflict",
        fields={"setting": "expandable_segments"},
        examples=("AssertionError: Expandable segments are not compatible with memory pool. Please track https://example.org",),
        near_misses=('    "Expandable segments are not compatible with memory pool. "',),
    ),
    Signature(
        name="expandable_segments_connector",
        anchor="is incompatible with PYTORCH",
        pattern=r"KV connector \S+ is incompatible with PYTORCH(?:_CUDA)?_ALLOC_CONF=expandable_segments:True",
        category="allocator_config_conflict",
        engine="vllm",
        fields={"setting": "expandable_segments"},
        examples=(
            "ValueError: KV connector NixlConnector is incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            "unless enable_sleep_mode / enable_cumem_allocator is also enabled",
        ),
    ),
    Signature(
        name="custom_all_reduce_conflict",
        anchor="custom_all_reduce.cuh",
        pattern=r"custom_all_reduce\.cuh:\d+ 'invalid argument'",
        category="allocator_config_conflict",
        fields={"setting": "custom_all_reduce"},
        examples=("Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'",),
    ),
    Signature(
        name="triton_out_of_resources",
        anchor="out of resource: shared memory",
        pattern=r"out of resource: shared memory, Required: (?P<required_bytes>\d+), Hardware limit: (?P<limit_bytes>\d+)",
        category="gpu_kernel_smem_limit",
        examples=(
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. "
            "Reducing block sizes or `num_stages` may help.",
        ),
    ),
    Signature(
        name="illegal_memory_access",
        anchor="an illegal memory access was encountered",
        pattern=r"an illegal memory access was encountered",
        category="cuda_illegal_memory_access",
        examples=(
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "CUDA error: an illegal memory access was encountered",
        ),
        near_misses=("INFO 07-15 10:00:01 [logger.py:43] Received request r1: prompt: 'what is: an illegal memory access was encountered'",),
    ),
    Signature(
        name="illegal_address",
        anchor="CUDA_ERROR_ILLEGAL_ADDRESS",
        pattern=r"CUDA_ERROR_ILLEGAL_ADDRESS",
        category="cuda_illegal_memory_access",
        examples=("terminate called: CUDA_ERROR_ILLEGAL_ADDRESS (700)",),
    ),
)  # fmt: skip
