"""Who holds the memory? Every byte NVML counts as used, given to a holder as far as the facts go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpu_oom_exporter.analysis.history import History
from gpu_oom_exporter.analysis.names import label
from gpu_oom_exporter.catalog.engines import DIALECTS
from gpu_oom_exporter.model import (
    EngineReport,
    Gap,
    Gpu,
    GpuProcess,
    Holder,
    Holding,
    Memory,
    MemoryKind,
    NvmlFacts,
    Ownership,
    Place,
    Process,
)

CONFIRM_READINGS = 3
"""A gap counts when it is there this often in a row: a process may end between NVML's list and /proc."""

COMM_BYTES = 15
"""The kernel keeps this much of a process title in comm (TASK_COMM_LEN − 1)."""

KEEP_SHARE = 0.75
"""A command keeps its series down to this share of the floor, so that one at the floor does not flap."""

WORKER_TITLES = tuple(title[:COMM_BYTES] for dialect in DIALECTS for title in dialect.titles)

MPS_COMMS = ("nvidia-cuda-mps", "nvidia-cuda-mps-server"[:COMM_BYTES])


def places(gpu: Gpu) -> list[tuple[Place, Memory | None, tuple[GpuProcess, ...] | None, frozenset[Gap]]]:
    """The places whose memory is counted: the MIG instances of *gpu*, or the GPU itself."""
    name = place_of(gpu)
    if not gpu.mig:
        return [(name, gpu.memory, gpu.processes, gpu.gaps)]
    return [
        (Place(name.gpu, name.uuid, str(i.id), i.profile), i.memory, i.processes, gpu.gaps | i.gaps)
        for i in gpu.instances
    ]


def place_of(gpu: Gpu) -> Place:
    """The whole *gpu*; without an index, as a lost GPU may be, the PCI address stands in."""
    return Place(str(gpu.index) if gpu.index is not None else gpu.pci_bus_id, gpu.uuid)


def own(nvml: NvmlFacts, engines: Iterable[EngineReport], history: History, new: bool) -> dict[Place, Ownership]:
    """Who holds each place of *nvml*; *new* says that this reading was not judged before."""
    engine_of = {pid: engine.name for engine in engines for pid in engine.pids}
    found = {}
    for gpu in nvml.gpus:
        for place, memory, processes, gaps in places(gpu):
            if gpu.up:
                found[place] = _own_place(gpu, place, memory, processes, gaps, nvml, engine_of, history, new)
    return found


def _own_place(
    gpu: Gpu,
    place: Place,
    memory: Memory | None,
    processes: tuple[GpuProcess, ...] | None,
    gaps: frozenset[Gap],
    nvml: NvmlFacts,
    engine_of: Mapping[int, str],
    history: History,
    new: bool,
) -> Ownership:
    now = set(gaps)
    holdings = []
    unresolved = False
    for listed in processes or ():
        process = nvml.processes.get(listed.pid)
        if process is None:
            if not nvml.host_pids:
                now.add(Gap.NO_HOST_PID)
            unresolved = True
        elif process.comm.startswith(MPS_COMMS):
            now.add(Gap.MPS)
        if listed.used_bytes is not None:
            holder = holder_of(listed, process, engine_of, nvml.host_pids)
            comm = label(process.comm) if process else ""
            holdings.append(Holding(listed.pid, comm, holder, listed.used_bytes, engine_of.get(listed.pid)))
    if processes is None and not now & {Gap.NO_PERMISSION, Gap.NOT_SUPPORTED}:
        now.add(Gap.NOT_SUPPORTED)
    confirmed = _confirmed(place, now | ({_UNRESOLVED} if unresolved and nvml.host_pids else set()), history, new)
    return Ownership(
        tuple(holdings),
        _held(gpu, memory, processes, holdings, now),
        not confirmed,
        frozenset(gap for gap in confirmed if isinstance(gap, Gap)),
    )


_UNRESOLVED = "unresolved"


def _confirmed(place: Place, gaps: set[Gap | str], history: History, new: bool) -> set[Gap | str]:
    """The gaps that were there in `CONFIRM_READINGS` readings in a row, this one included."""
    counts = history.gap_readings
    if new:
        for gap in gaps:
            counts[place, gap] = counts.get((place, gap), 0) + 1
        for key in [key for key in counts if key[0] == place and key[1] not in gaps]:
            del counts[key]
    return {gap for gap in gaps if counts.get((place, gap), 0) >= CONFIRM_READINGS}


def holder_of(listed: GpuProcess, process: Process | None, engine_of: Mapping[int, str], host_pids: bool) -> Holder:
    """What kind of holder one process is."""
    if listed.kind == "graphics":
        return Holder.GRAPHICS
    if listed.kind == "mps" or (process is not None and process.comm.startswith(MPS_COMMS)):
        return Holder.MPS
    if process is None:
        # without host PIDs it is some process; with them it is a PID that nobody has: ignorance, no verdict
        return Holder.UNATTRIBUTED if host_pids else Holder.PROCESS
    if process.state in "Tt":
        return Holder.SUSPENDED
    if listed.pid in engine_of or process.comm.startswith(WORKER_TITLES):
        return Holder.ENGINE
    return Holder.PROCESS


def _held(
    gpu: Gpu,
    memory: Memory | None,
    processes: tuple[GpuProcess, ...] | None,
    holdings: list[Holding],
    gaps: set[Gap],
) -> dict[Holder, int] | None:
    """Bytes by holder. `unattributed` is there only where used, reserved and every process are known."""
    if processes is None or any(p.used_bytes is None for p in processes):
        return None
    held: dict[Holder, int] = {h: 0 for h in Holder if h not in (Holder.UNATTRIBUTED, Holder.ORPHAN)}
    unresolved = 0
    for holding in holdings:
        if holding.holder is Holder.UNATTRIBUTED:
            unresolved += holding.used_bytes
        else:
            held[holding.holder] += holding.used_bytes
    if memory is not None and gpu.memory_kind is MemoryKind.DEDICATED and not gaps & {Gap.WDDM, Gap.VGPU}:
        rest = memory.used_bytes - sum(holding.used_bytes for holding in holdings)
        held[Holder.UNATTRIBUTED] = unresolved + max(0, rest)
    return held


def by_command(
    ownership: Mapping[Place, Ownership], floor_bytes: int, history: History
) -> dict[tuple[Place, str], int]:
    """Bytes per place and command; a command enters at *floor_bytes* and leaves at three quarters of it."""
    found: dict[tuple[Place, str], int] = {}
    for place, owned in ownership.items():
        sums: dict[str, int] = {}
        for holding in owned.holdings:
            if holding.comm:
                sums[holding.comm] = sums.get(holding.comm, 0) + holding.used_bytes
        for comm, used in sums.items():
            if used >= floor_bytes or (used >= floor_bytes * KEEP_SHARE and (place, comm) in history.commands):
                found[place, comm] = used
    history.commands = set(found)
    return found
