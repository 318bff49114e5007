"""Log lines we recognise, as data. Adding one is adding a row here and nothing else; its examples are its test.

Order matters to nobody: a line is claimed by the one signature whose pattern it matches.
"""

from __future__ import annotations

from gpu_oom_exporter.catalog.signatures.device import DEVICE
from gpu_oom_exporter.catalog.signatures.engines import LLAMA, OLLAMA, OTHERS, SGLANG, TGI, TRTLLM
from gpu_oom_exporter.catalog.signatures.host import HOST, KERNEL, KILLED, SHARED
from gpu_oom_exporter.catalog.signatures.phases import FRAMES, PHASE_CATEGORY
from gpu_oom_exporter.catalog.signatures.platform import AROUND, CONTAINERS, DRIVER
from gpu_oom_exporter.catalog.signatures.signature import Role, Signature
from gpu_oom_exporter.catalog.signatures.vllm import VLLM

SIGNATURES: tuple[Signature, ...] = (
    *DEVICE, *VLLM, *SGLANG, *TGI, *LLAMA, *OLLAMA, *TRTLLM, *OTHERS,
    *KERNEL, *KILLED, *SHARED, *HOST, *DRIVER, *CONTAINERS, *AROUND,
)  # fmt: skip

__all__ = ["FRAMES", "PHASE_CATEGORY", "SIGNATURES", "Role", "Signature"]
