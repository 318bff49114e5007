"""How much room is left? Device memory, promised and serving headroom, with their low-water marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpu_oom_exporter.analysis.history import HEADROOM_SECONDS, SERVING_SECONDS, History, SlidingMin
from gpu_oom_exporter.analysis.ownership import places
from gpu_oom_exporter.catalog.engines import BY_NAME
from gpu_oom_exporter.model import (
    EngineReport,
    EngineState,
    Headroom,
    HostFacts,
    Memory,
    MemoryKind,
    NvmlFacts,
    Ownership,
    Place,
)


def measure(
    nvml: NvmlFacts,
    host: HostFacts | None,
    engines: Iterable[EngineReport],
    ownership: Mapping[Place, Ownership],
    history: History,
    mono: float,
) -> dict[Place, Headroom]:
    """The room of every place that was read."""
    engines = tuple(engines)
    found = {}
    for gpu in nvml.gpus:
        if not gpu.up:
            continue
        for place, memory, processes, _ in places(gpu):
            if gpu.memory_kind is MemoryKind.UNIFIED and not gpu.mig:
                used = None
                if processes is not None and all(p.used_bytes is not None for p in processes):
                    used = sum(p.used_bytes or 0 for p in processes)
                room = _unified(host, used)
            else:
                room = _dedicated(memory)
            if room is not None:
                promised = _promised(place, engines, ownership.get(place))
                found[place] = _with_minima(place, room, promised, engines, history, mono)
    for kept in (history.headroom, history.serving):
        for place in kept.keys() - found.keys():
            del kept[place]
    return found


def _dedicated(memory: Memory | None) -> Headroom | None:
    if memory is None:
        return None
    return Headroom(
        total_bytes=memory.total_bytes,
        reserved_bytes=memory.reserved_bytes,
        used_bytes=memory.used_bytes,
        free_bytes=memory.free_bytes,
        headroom_bytes=memory.free_bytes,
        headroom_ratio=memory.free_bytes / memory.total_bytes,
    )


def _unified(host: HostFacts | None, used: int | None) -> Headroom | None:
    """A GPU that shares the CPU's memory: what counts is MemAvailable, and there is no total of its own."""
    if host is None or host.memory_available_bytes is None:
        return None
    total = host.memory_total_bytes
    return Headroom(
        used_bytes=used,
        headroom_bytes=host.memory_available_bytes,
        headroom_ratio=host.memory_available_bytes / total if total else None,
    )


def _promised(place: Place, engines: tuple[EngineReport, ...], owned: Ownership | None) -> int | None:
    """Budget of sleeping and loading engines that they have not taken yet; None when one's budget is not known."""
    promised = 0
    for engine in engines:
        if engine.state not in (EngineState.ASLEEP, EngineState.LOADING) or place not in engine.places:
            continue
        budget = engine.budgets.get(place)
        if budget is None:
            return None
        taken = sum(h.used_bytes for h in owned.holdings if h.pid in engine.pids) if owned else 0
        promised += max(0, budget - taken)
    return promised


def _with_minima(
    place: Place,
    room: Headroom,
    promised: int | None,
    engines: tuple[EngineReport, ...],
    history: History,
    mono: float,
) -> Headroom:
    headroom = room.headroom_bytes or 0
    minimum = history.headroom.setdefault(place, SlidingMin(HEADROOM_SECONDS)).add(mono, headroom)
    serving = None
    if promised is None:
        history.serving.pop(place, None)
    elif any(e.state is EngineState.READY and place in e.places and BY_NAME[e.kind].grows for e in engines):
        serving = history.serving.setdefault(place, SlidingMin(SERVING_SECONDS)).add(mono, headroom - promised)
    else:
        history.serving.pop(place, None)
    return Headroom(
        room.total_bytes,
        room.reserved_bytes,
        room.used_bytes,
        room.free_bytes,
        room.headroom_bytes,
        room.headroom_ratio,
        minimum,
        promised,
        serving,
    )
