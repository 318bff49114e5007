"""Short ways to write facts for the tests of analysis."""

from __future__ import annotations

from typing import Any

from gpu_oom_exporter import config
from gpu_oom_exporter.analysis import State, think
from gpu_oom_exporter.model import (
    Answer,
    EngineFacts,
    EngineRank,
    Gpu,
    GpuProcess,
    Memory,
    MemoryKind,
    NvmlFacts,
    Place,
    Process,
    Report,
    Snapshot,
)

MIB = 1024**2
GIB = 1024**3
PLACE = Place("0", "GPU-0")
PLACES = [Place(str(n), f"GPU-{n}") for n in range(8)]


def gpu(*processes: GpuProcess, used: int = 10 * GIB, index: int = 0, **more: Any) -> Gpu:
    memory = Memory(80 * GIB, used, 80 * GIB - GIB - used, GIB)
    return Gpu(
        **{
            "index": index,
            "uuid": f"GPU-{index}",
            "pci_bus_id": f"00000000:{index:02X}:00.0",
            "name": "H100",
            "minor": index,
            "memory": memory,
            "memory_kind": MemoryKind.DEDICATED,
            "processes": processes,
            **more,
        }
    )


def on_gpu(pid: int, used: int | None = GIB, kind: str = "compute", sm: float | None = 0.0) -> GpuProcess:
    return GpuProcess(pid, kind, used, sm)


def process(pid: int, comm: str = "python3", ppid: int = 1, **more: Any) -> Process:
    return Process(**{"pid": pid, "start_ticks": pid, "comm": comm, "state": "S", "ppid": ppid, **more})


def nvml(*gpus: Gpu, processes: tuple[Process, ...] = (), **more: Any) -> NvmlFacts:
    return NvmlFacts("580.95", gpus, {p.pid: p for p in processes}, **more)


def engine(name: str = "chat", answer: Answer = Answer.OK, **more: Any) -> EngineFacts:
    return EngineFacts(
        **{
            "name": name,
            "kind": "vllm",
            "url": "http://127.0.0.1:8000",
            "answer": answer,
            "local": True,
            "port": 8000,
            "model_name": "m",
            "ranks": (EngineRank("0", kv_used_ratio=0.5, gpu_memory_utilization=0.9),) if answer is Answer.OK else (),
            **more,
        }
    )


class Thinker:
    """Thinks about one snapshot after the other."""

    def __init__(self, **settings: Any) -> None:
        self.state = State()
        self.config = config.Config(**settings)
        self.mono = 1000.0

    def __call__(self, seconds: float = 1.0, **facts: Any) -> Report:
        self.mono += seconds
        snapshot = Snapshot(time=1.8e9 + self.mono, mono=self.mono, **facts)
        self.state = think(snapshot, self.state, self.config)
        assert self.state.report is not None
        return self.state.report
