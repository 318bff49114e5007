"""Who holds the memory? Every byte NVML counts as used, given to a holder as far as the facts go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gpu_oom_exporter.analysis import orphans
from gpu_oom_exporter.analysis.history import Deceased, History, Residents
from gpu_oom_exporter.analysis.names import label
from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.catalog.engines import role_of
from gpu_oom_exporter.config import Processes
from gpu_oom_exporter.model import (
    NO_WORKLOAD,
    Cause,
    ContainerFacts,
    EngineReport,
    EngineState,
    Gap,
    Gpu,
    GpuInstance,
    GpuProcess,
    Holder,
    Holding,
    Memory,
    MemoryKind,
    NvmlFacts,
    Ownership,
    Place,
    Process,
    Workload,
)

CONFIRM_READINGS = 3
"""A gap counts when it is there this often in a row: a process may end between NVML's list and /proc."""

KEEP_SHARE = 0.75
"""A command keeps its series down to this share of the floor, so that one at the floor does not flap."""

IDLE_SECONDS = 6 * 3600.0
"""A process without GPU activity for this long is idle (`design.md` §2): longer than a night's data preparation."""

IMPORTER_RATIO = 0.02
"""How close an importer's bytes are to a dead exporter's (`design.md` §5)."""

IMPORTER_SECONDS = 3600.0
"""After an hour a coincidence of sizes says nothing."""

UNEXPLAINED_BYTES = 1024**3
"""An idle GPU has less than this in use; more has a holder."""

MPS_COMMS = ("nvidia-cuda-mps",)

AWAKE = (EngineState.READY, EngineState.LOADING)


def places(gpu: Gpu) -> list[tuple[Place, Memory | None, tuple[GpuProcess, ...] | None, frozenset[Gap]]]:
    """The places whose memory is counted: the MIG instances of *gpu*, or the GPU itself."""
    name = place_of(gpu)
    if not gpu.mig:
        return [(name, gpu.memory, gpu.processes, gpu.gaps)]
    return [
        (Place(name.gpu, name.uuid, str(i.id), i.profile), i.memory, i.processes, _gaps_of(gpu, i))
        for i in gpu.instances
    ]


def _gaps_of(gpu: Gpu, instance: GpuInstance) -> frozenset[Gap]:
    """What keeps us from naming the holders of *instance*: the parent's closed list is no gap where its own is open."""
    if instance.processes is None:
        return gpu.gaps | instance.gaps
    return (gpu.gaps - {Gap.NO_PERMISSION, Gap.NOT_SUPPORTED}) | instance.gaps


def kind_of(gpu: Gpu, place: Place) -> MemoryKind:
    """Which question NVML answered about the memory of *place*."""
    return next((i.memory_kind for i in gpu.instances if str(i.id) == place.instance_id), gpu.memory_kind)


def place_of(gpu: Gpu) -> Place:
    """The whole *gpu*; without an index, as a lost GPU may be, the PCI address stands in."""
    return Place(str(gpu.index) if gpu.index is not None else gpu.pci_bus_id, gpu.uuid)


@dataclass(frozen=True, slots=True)
class Scene:
    """What every place is judged with: the facts of one reading, settings, and what is remembered."""

    nvml: NvmlFacts
    engines: tuple[EngineReport, ...]
    containers: ContainerFacts | None
    settings: Processes
    history: History
    mono: float
    new: bool
    confirm_seconds: Mapping[Cause, float] | None = None


def own(scene: Scene) -> dict[Place, Ownership]:
    """Who holds each place of the scene's reading; `scene.new` says that it was not judged before."""
    nvml, history = scene.nvml, scene.history
    pids = {p.pid for gpu in nvml.gpus for _, _, processes, _ in places(gpu) for p in processes or ()}
    orphans.remember_workers(nvml, history, pids)
    engine_of = {pid: engine.name for engine in scene.engines for pid in engine.pids}
    found = {}
    for gpu in nvml.gpus:
        for place, memory, processes, gaps in places(gpu):
            if gpu.up:
                found[place] = _own_place(gpu, place, memory, processes, gaps, engine_of, scene)
    _forget(pids, found, scene)
    return found


def _forget(pids: set[int], found: Mapping[Place, Ownership], scene: Scene) -> None:
    """Bound what is remembered by what is there."""
    history = scene.history
    starts = {(pid, _start(pid, scene.nvml)) for pid in pids}
    for key in [key for key in history.sightings if key[2:] not in starts]:
        del history.sightings[key]
    for times in (history.active, history.arrived):
        for process in [process for process in times if process not in starts]:
            del times[process]
    for remembered in (history.kept, history.engines, history.deceased, history.residents):
        for place in remembered.keys() - found.keys():
            del remembered[place]


def _start(pid: int, nvml: NvmlFacts) -> int:
    process = nvml.processes.get(pid)
    return process.start_ticks if process is not None else 0


def _own_place(
    gpu: Gpu,
    place: Place,
    memory: Memory | None,
    processes: tuple[GpuProcess, ...] | None,
    gaps: frozenset[Gap],
    engine_of: Mapping[int, str],
    scene: Scene,
) -> Ownership:
    nvml, history = scene.nvml, scene.history
    now: set[Gap | str] = set(gaps)
    for listed in processes or ():
        process = nvml.processes.get(listed.pid)
        if listed.kind == "mps" or (process is not None and process.comm.startswith(MPS_COMMS)):
            now.add(Gap.MPS)
        elif process is None and not nvml.host_pids:
            now.add(Gap.NO_HOST_PID)
        elif process is None and listed.pid not in nvml.dead:
            now.add(_UNRESOLVED)
    if processes is not None and not nvml.host_pids and memory is not None and memory.used_bytes > UNEXPLAINED_BYTES:
        now.add(Gap.NO_HOST_PID)  # an empty list may be a list of processes that are not ours to see
    if processes is None and not now & {Gap.NO_PERMISSION, Gap.NOT_SUPPORTED}:
        now.add(Gap.NOT_SUPPORTED)
    confirmed = _confirmed(place, now, history, scene.new)
    known = frozenset(gap for gap in now if isinstance(gap, Gap))
    holdings = [
        _holding(gpu, place, listed, known, engine_of, scene)
        for listed in processes or ()
        if listed.used_bytes is not None
    ]
    holdings = _above_floor(holdings, orphans.floor_bytes(memory.total_bytes if memory else None))
    if processes is not None:
        holdings = _with_importers(place, holdings, scene)
    told = frozenset(gap for gap in confirmed if isinstance(gap, Gap))
    if processes is None:
        return _carried(place, Ownership((), None, not confirmed, told, seen_gaps=known), history)
    provable = nvml.host_pids and not known & orphans.NO_VERDICT and gpu.memory_kind is not MemoryKind.UNIFIED
    owned = Ownership(
        tuple(holdings),
        _held(kind_of(gpu, place), memory, processes, holdings, known),
        not confirmed,
        told,
        _by_cause(holdings) if provable else None,
        _contexts(holdings) if provable else None,
        _idle(holdings, processes, scene),
        _newcomers(place, holdings, known, scene),
        _overcommit(place, memory, processes, holdings, scene),
        known,
    )
    history.kept[place] = (owned, 0)
    return owned


_UNRESOLVED = "unresolved"


def _carried(place: Place, owned: Ownership, history: History) -> Ownership:
    """An incomplete reading: the verdicts before it live on for a few readings."""
    before, misses = history.kept.get(place, (owned, orphans.INCOMPLETE_READINGS))
    if misses >= orphans.INCOMPLETE_READINGS:
        return owned
    history.kept[place] = (before, misses + 1)
    return replace(owned, orphaned=before.orphaned, orphaned_contexts=before.orphaned_contexts)


def _confirmed(place: Place, gaps: set[Gap | str], history: History, new: bool) -> set[Gap | str]:
    """The gaps that were there in `CONFIRM_READINGS` readings in a row, this one included."""
    counts = history.gap_readings
    if new:
        for gap in gaps:
            counts[place, gap] = counts.get((place, gap), 0) + 1
        for key in [key for key in counts if key[0] == place and key[1] not in gaps]:
            del counts[key]
    return {gap for gap in gaps if counts.get((place, gap), 0) >= CONFIRM_READINGS}


def _holding(
    gpu: Gpu, place: Place, listed: GpuProcess, gaps: frozenset[Gap], engine_of: Mapping[int, str], scene: Scene
) -> Holding:
    """The bytes of one process and its kind of holder, with a confirmed verdict if there is one."""
    process = scene.nvml.processes.get(listed.pid)
    suspicion = orphans.suspect(gpu, listed, scene.nvml, scene.containers, gaps, scene.history)
    start = process.start_ticks if process is not None else 0
    verdict = orphans.confirm(
        (place.uuid, place.instance_id, listed.pid, start), suspicion, scene.history, scene.mono, scene.confirm_seconds
    )
    holder = holder_of(listed, process, engine_of, scene.nvml.host_pids)
    container, workload = _workload(process, scene.containers)
    return Holding(
        listed.pid,
        label(process.comm) if process else "",
        Holder.ORPHAN if verdict is not None else holder,
        listed.used_bytes or 0,
        engine_of.get(listed.pid),
        verdict.cause if verdict is not None else None,
        verdict.evidence if verdict is not None else (),
        container,
        workload,
    )


def _above_floor(holdings: list[Holding], floor: int) -> list[Holding]:
    """Verdicts of a cause that comes to less than *floor* are dropped: too small to send a person for."""
    sums = _by_cause(holdings)
    return [
        replace(h, holder=_before_verdict(h), cause=None, evidence=())
        if h.cause is not None and sums[h.cause] < floor
        else h
        for h in holdings
    ]


def _before_verdict(holding: Holding) -> Holder:
    """What *holding* would be without its verdict."""
    if holding.cause is Cause.ENGINE_ORPHAN:
        return Holder.ENGINE
    return Holder.PROCESS if holding.comm else Holder.UNATTRIBUTED


def _with_importers(place: Place, holdings: list[Holding], scene: Scene) -> list[Holding]:
    """Name who may keep a dead engine's memory through CUDA IPC: a process that has just as much as it had.

    Only when the engine's end was watched, and the process was there before it; this is evidence, no verdict.
    """
    history = scene.history
    now = {h.pid: (h.comm, h.used_bytes) for h in holdings if h.holder is Holder.ENGINE}
    present = {h.pid for h in holdings}
    gone = history.deceased.setdefault(place, deque(maxlen=8))
    for pid, (comm, used) in history.engines.get(place, {}).items():
        if pid not in present:
            gone.append(Deceased(pid, comm, used, scene.mono))
    history.engines[place] = now
    while gone and scene.mono - gone[0].mono > IMPORTER_SECONDS:
        gone.popleft()
    if not gone:
        for holding in holdings:
            history.arrived.setdefault((holding.pid, _start(holding.pid, scene.nvml)), scene.mono)
        return holdings
    found = []
    for holding in holdings:
        arrived = history.arrived.setdefault((holding.pid, _start(holding.pid, scene.nvml)), scene.mono)
        for dead in gone if holding.holder is Holder.PROCESS else ():
            if arrived < dead.mono and abs(holding.used_bytes - dead.used_bytes) <= IMPORTER_RATIO * dead.used_bytes:
                line = f"has as much as {dead.comm!r} (PID {dead.pid}) had when it ended: it may keep it by CUDA IPC"
                holding = replace(holding, evidence=(*holding.evidence, line))
                break
        found.append(holding)
    return found


def _by_cause(holdings: Iterable[Holding]) -> dict[Cause, int]:
    sums = dict.fromkeys(Cause, 0)
    for holding in holdings:
        if holding.cause is not None:
            sums[holding.cause] += holding.used_bytes
    return sums


def _contexts(holdings: Iterable[Holding]) -> dict[Cause, int]:
    counts = dict.fromkeys(Cause, 0)
    for holding in holdings:
        if holding.cause is not None:
            counts[holding.cause] += 1
    return counts


def _workload(process: Process | None, containers: ContainerFacts | None) -> tuple[str, Workload]:
    """(container or unit name for people, workload labels) of *process*; missing names cost only themselves."""
    found = workload_of(process.cgroup) if process is not None else None
    if found is None:
        return "", NO_WORKLOAD
    return _named(*found, containers)


def _named(runtime: str, identity: str, containers: ContainerFacts | None) -> tuple[str, Workload]:
    if runtime in ("systemd", "slurm", "lxc"):
        return label(f"{runtime}:{identity}"), NO_WORKLOAD
    known = containers.by_id.get(identity) if containers is not None else None
    if known is None:
        return f"{runtime}:{identity[:12]}", NO_WORKLOAD
    return label(known.name or identity[:12]), Workload(label(known.namespace), label(known.pod), label(known.name))


def holder_of(listed: GpuProcess, process: Process | None, engine_of: Mapping[int, str], host_pids: bool) -> Holder:
    """What kind of holder one process is."""
    if listed.kind == "graphics":
        return Holder.GRAPHICS
    if listed.kind == "mps" or (process is not None and process.comm.startswith(MPS_COMMS)):
        return Holder.MPS
    if process is None:
        # without host PIDs it is some process; with them it is a PID that nobody has: ignorance until proven
        return Holder.UNATTRIBUTED if host_pids else Holder.PROCESS
    if process.state in "Tt" or process.frozen:
        return Holder.SUSPENDED
    if listed.pid in engine_of or role_of(process.comm, process.argv) is not None:
        return Holder.ENGINE
    return Holder.PROCESS


def _held(
    kind: MemoryKind,
    memory: Memory | None,
    processes: tuple[GpuProcess, ...],
    holdings: list[Holding],
    gaps: frozenset[Gap],
) -> dict[Holder, int] | None:
    """Bytes by holder. `unattributed` is there only where used, reserved and every process are known."""
    if any(p.used_bytes is None for p in processes):
        return None
    held: dict[Holder, int] = {h: 0 for h in Holder if h is not Holder.UNATTRIBUTED}
    unresolved = 0
    for holding in holdings:
        if holding.holder is Holder.UNATTRIBUTED:
            unresolved += holding.used_bytes
        else:
            held[holding.holder] += holding.used_bytes
    if memory is not None and kind is MemoryKind.DEDICATED and not gaps & {Gap.WDDM, Gap.VGPU}:
        rest = memory.used_bytes - sum(holding.used_bytes for holding in holdings)
        held[Holder.UNATTRIBUTED] = unresolved + max(0, rest)
    return held


def _idle(holdings: list[Holding], processes: tuple[GpuProcess, ...], scene: Scene) -> int | None:
    """Bytes of live processes, no engines, that have not computed for six hours; None when nobody could tell."""
    activity = {p.pid: p.sm_ratio for p in processes}
    if any(ratio is None for ratio in activity.values()):
        return None
    active, idle = scene.history.active, 0
    for holding in holdings:
        key = (holding.pid, _start(holding.pid, scene.nvml))
        if key not in active or activity.get(holding.pid):
            active[key] = scene.mono
        patient = any(fnmatchcase(holding.comm, pattern) for pattern in scene.settings.idle_allow)
        if holding.holder is Holder.PROCESS and not patient and scene.mono - active[key] >= IDLE_SECONDS:
            idle += holding.used_bytes
    return idle


def _newcomers(place: Place, holdings: list[Holding], gaps: frozenset[Gap], scene: Scene) -> int | None:
    """Bytes of processes that joined a serving GPU after its engine was ready; None where nothing serves."""
    here = [engine for engine in scene.engines if place in engine.places]
    serving = any(engine.state is EngineState.READY for engine in here)
    asleep = any(engine.state is EngineState.ASLEEP for engine in here)
    if not serving or asleep or Gap.MPS in gaps:
        if not serving:
            scene.history.residents.pop(place, None)
        return None
    present = {(h.pid, _start(h.pid, scene.nvml)) for h in holdings}
    residents = scene.history.residents.setdefault(place, Residents(scene.mono, set(present)))
    engines = {pid for engine in here for pid in engine.pids}
    newcomers = 0
    for holding in holdings:
        key = (holding.pid, _start(holding.pid, scene.nvml))
        if key in residents.pids or holding.pid in engines or holding.holder is Holder.ORPHAN:
            continue
        if not any(fnmatchcase(holding.comm, pattern) for pattern in scene.settings.cotenant_allow):
            newcomers += holding.used_bytes
    return newcomers


def _overcommit(
    place: Place, memory: Memory | None, processes: tuple[GpuProcess, ...], holdings: list[Holding], scene: Scene
) -> int | None:
    """Budgets of awake engines + everybody else's bytes − total; None unless every term is known."""
    awake = [engine for engine in scene.engines if place in engine.places and engine.state in AWAKE]
    if memory is None or not awake or any(p.used_bytes is None for p in processes):
        return None
    if any(place not in engine.budgets for engine in awake):
        return None
    pids = {pid for engine in awake for pid in engine.pids}
    others = sum(holding.used_bytes for holding in holdings if holding.pid not in pids)
    return max(
        0, sum(engine.budgets[place] for engine in awake) + others - memory.total_bytes + (memory.reserved_bytes or 0)
    )


def by_command(
    ownership: Mapping[Place, Ownership], settings: Processes, history: History
) -> dict[tuple[Place, str, Workload, str], int]:
    """Bytes per place, command, workload and, if wanted, PID; from the floor on, down to three quarters of it."""
    floor_bytes = settings.floor_bytes
    found: dict[tuple[Place, str, Workload, str], int] = {}
    for place, owned in ownership.items():
        sums: dict[tuple[str, Workload, str], int] = {}
        for holding in owned.holdings:
            if holding.comm:
                name = (holding.comm, holding.workload, str(holding.pid) if settings.show_pid else "")
                sums[name] = sums.get(name, 0) + holding.used_bytes
        for (comm, workload, pid), used in sums.items():
            key = (place, comm, workload, pid)
            if used >= floor_bytes or (used >= floor_bytes * KEEP_SHARE and key in history.commands):
                found[key] = used
    history.commands = set(found)
    return found
