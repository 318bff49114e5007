"""Pasted terminal sessions: which commands begin one, and which process names mean what."""

from __future__ import annotations

_COMMANDS = (
    r"(?:inside|in the|in a|on the|on) (?:container|host|pod|node)",
    r"nvidia-smi",
    r"nvml",
    r"ps ",
    r"cat /proc",
    r"ls ",
    r"readlink ",
    r"(?:docker|podman|crictl|kubectl) ",
    r"kill ",
    r"fuser ",
    r"lsof ",
    r"pid \d+ ",
    r"\d+ ?(?:h|hours?|min) window",
    r"GET ",
    r"curl ",
    r"compute apps",
)
OPENER = r"(?:[\w.@:~/-]*[#$] (?:\w+: )?(?:sudo )?(?:" + "|".join(_COMMANDS) + r")|\| NVIDIA-SMI \d)"
"""How the line looks that opens a session: a prompt and a command, or nvidia-smi's own head; google-re2 and re."""

ENGINE_PROCESS = r"VLLM::|vllm|EngineCor|sglang|text-generation|llama-server|llama_server|ollama|trtllm|lmdeploy|tritonserver|RayWorker"
"""Process names of inference engines and their workers."""

ENGINE_TASK = (
    r"(?:^|[/._-])(?:python[\d.]*|pt_main\w*|VLLM|vllm\w*|Engine ?Cor\w*|sglang|ray|raylet|llama\w*|ollama\w*|text-gen\w*|tgi"
    r"|trt\w*|triton\w*|lmdeploy\w*|uvicorn|cuda-EvtHandlr|llm\w*|inference\w*|docker|cri-containerd|kubepods\w*)(?:$|[:/._@-])"
)
"""Names of kernel tasks, units, cgroups and pods that can be an engine's; a container's cgroup can be anybody's."""

IMPORTER_PROCESS = r"lmcache|mooncake|nixl|weight[-_ ]?(?:sync|server)|cuda[-_ ]?ipc|kv[-_ ]?(?:cache|store|server)"
"""Process names that map other engines' memory through CUDA IPC."""

MPS_SERVER = "nvidia-cuda-mps-server"
