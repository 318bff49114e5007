"""What frees memory: one row per kind of holder or cause, and one per gap in what we can see."""

from __future__ import annotations

from gpu_oom_exporter.model import Cause, Gap, Holder, Holding

FREE = {
    Cause.DEAD_PID: (
        "no signal can help: no process is left",
        "drain the GPU, stop everything that has it open, then: nvidia-smi --gpu-reset -i {uuid}",
        "if the reset is refused: reboot",
    ),
    Cause.STUCK: (
        "no signal can help: SIGKILL is pending and the driver does not let go",
        "drain the node and reboot it; a reset is refused while the process is there",
    ),
    Cause.DEFUNCT: (
        "end what keeps it: the thread or child named above, or the parent that does not collect it",
        "gpu-oom-exporter release {pid} does so, or says whose it is",
    ),
    Cause.ENGINE_ORPHAN: ("gpu-oom-exporter release {pid}",),
    Cause.CONTAINER_GONE: ("gpu-oom-exporter release {pid}",),
}

HOLD = {
    Holder.SUSPENDED: ("resume it (kill -CONT {pid}, docker unpause), or let its owner end it",),
    Holder.MPS: (
        "clients' memory is counted at the server; ending it ends them all: echo quit | nvidia-cuda-mps-control",
    ),
}

SEE = {
    Gap.NO_HOST_PID: "NVML names PIDs of the host; run in its PID namespace (docker --pid=host, hostPID: true)",
    Gap.NO_PERMISSION: "the driver does not show the processes; run as root, or outside the MIG container",
    Gap.WDDM: "Windows keeps the memory of each process to itself; look in the Task Manager",
    Gap.MPS: "under MPS the memory of clients is counted at the server",
    Gap.VGPU: "the memory belongs to virtual machines; look inside them",
    Gap.NOT_SUPPORTED: "this driver or GPU does not tell the memory of processes",
}
"""Why a holder cannot be named, and what to do about it."""


def remedies(holding: Holding, uuid: str) -> list[str]:
    """What frees the memory of *holding*; empty where it is used as it should be."""
    rows = FREE[holding.cause] if holding.cause is not None else HOLD.get(holding.holder, ())
    return [row.format(pid=holding.pid, uuid=uuid) for row in rows]
