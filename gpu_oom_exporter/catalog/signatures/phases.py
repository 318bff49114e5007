"""What a process was doing when it ran out: read from the frames of its traceback.

Function and file names: vLLM 0.2.7 to 0.33, SGLang 0.1 to 0.5, TGI 0.8 to 3, LMDeploy, transformers, PyTorch.
"""

from __future__ import annotations

PHASE_CATEGORY = {
    "sampler": "cuda_oom_sampler_warmup",
    "graph": "cuda_oom_cuda_graph_capture",
    "wake": "cuda_oom_sleep_wake",
    "kv_alloc": "cuda_oom_kv_alloc",
    "weights": "cuda_oom_weights_load",
    "training": "cuda_oom_training",
    "profiling": "cuda_oom_profiling",
}
"""Phase → category, the most specific first: a traceback can hold several."""

FRAMES: tuple[tuple[str, str], ...] = (
    ("sampler", r"in (?:_dummy_sampler_run|_dummy_pooler_run\w*)$"),
    ("graph", r"in (?:\w*capture\w*|\w*cuda_?graph_?warmup\w*|init_(?:device|cuda)_graphs?|profile_cudagraph_memory)$"
     r'|/\w*cuda_?graph_(?:runner|manager)\.py", line \d+, in (?:__init__|run_once)$'),
    ("wake", r"in (?:wake_up|create_and_map|resume_memory_occupation)$|/(?:cumem|torch_memory_saver)\.py"),
    ("kv_alloc", r"in (?:_allocate_kv_cache\w*|allocate_kv_cache\w*|_allocate_gpu_cache|allocate_gpu_cache|initialize_kv_cache\w*"
     r"|initialize_from_config|init_cache_engine|_init_cache_engine|initialize_cache|init_memory_pool|init_kv_cache\w*|_create_buffers"
     r"|build_cache_engine|_reshape_kv_cache\w*)$|/cache_engine\.py"),
    ("weights", r"in (?:load_model|\w*(?:load|create|get)_\w*weights?\w*|_initialize_model|initialize_model"
     r"|process_weights_after_loading|from_pretrained|_load_pretrained_model|weight_loader|get_sharded|get_tensor"
     r"|get_multi_weights\w*|load_checkpoint\w*|load_state_dict|_load_w\d+)$|/model_loader/"),
    ("training", r"in (?:backward|_engine_run_backward|run_backward|optimizer_step|training_step|_take_optimizer_step|_init_group)$"
     r"|/torch/optim/|/torch/autograd/|/bitsandbytes/optim/|/torch/utils/checkpoint\.py.*in backward"),
    ("profiling", r"in (?:profile_run|determine_available_memory|determine_num_available_blocks|profile_num_available_blocks"
     r"|_dummy_run|kernel_warmup|compile_or_warm_up_model|profile|warmup|warmup_model|_warmup|estimate_max_tokens)$"),
    ("runtime", r"in (?:execute_model|sample_tokens|_get_prompt_logprobs_dict|forward_batch_generation|forward_extend|forward_decode"
     r"|event_loop_\w+|run_engine_loop|run_busy_loop|execute_dummy_batch|apply|forward|generate|generate_token|compute_logprobs"
     r"|embed|rerank|prefill|decode|process_batch_\w+|__call__)$"),
)  # fmt: skip
"""(phase, pattern over a line ``File "F", line N, in FUNCTION``), in the order of `PHASE_CATEGORY`; runtime is the weakest."""
