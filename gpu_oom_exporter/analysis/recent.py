"""What went wrong lately, and whose is it? Incidents from the logs, joined to engines, GPUs and workloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu_oom_exporter.catalog.categories import CATEGORIES, Group, Severity
from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.model import (
    NO_WORKLOAD,
    ContainerFacts,
    EngineFacts,
    EngineReport,
    GpuIdentity,
    LogFacts,
    Ownership,
    Place,
    Recorded,
    Whose,
    Workload,
)

RECENT_SECONDS, STARTUP_SECONDS = 900.0, 1800.0
"""How long an incident counts as recent; a failed start is tried again, so it counts for longer (`design.md` §4)."""

DEATH_SECONDS = 1800.0
SAME_EVENT_SECONDS = 60.0
"""A kill that the kernel tells of explains what else ended in its container this close to it."""

ENDS = frozenset({"worker_sigkilled", "engine_core_died"})
"""How a kill looks from inside: by themselves SIGKILL and exit 137 prove no lack of memory."""

MOST_SERIES = 32
"""Series of recent incidents; what does not fit is summed under its group alone."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What incidents are joined with."""

    engines: Sequence[EngineReport]
    polled: Sequence[EngineFacts]
    gpus: Sequence[GpuIdentity]
    ownership: Mapping[Place, Ownership]
    containers: ContainerFacts | None


def totals(logs: LogFacts) -> dict[str, int]:
    """How many incidents of every category there were: 0 is a fact once the archive was read."""
    return {name: logs.totals.get(name, 0) for name in CATEGORIES}


def recent(logs: LogFacts, time: float, scene: Scene) -> dict[Whose, int]:
    """Incidents of the last minutes by group and owner, at most `MOST_SERIES` of them."""
    counts: dict[Whose, int] = {}
    for recorded, whose in _events(logs, scene):
        group = CATEGORIES[recorded.incident.category].group
        if time - recorded.time > (STARTUP_SECONDS if group is Group.STARTUP else RECENT_SECONDS):
            continue
        if whose not in counts and len(counts) >= MOST_SERIES - len(Group):
            whose = Whose(group.value)
        counts[whose] = counts.get(whose, 0) + 1
    return counts


def deaths(logs: LogFacts, time: float, scene: Scene) -> dict[str, int]:
    """Engine → how often it died of an incident within half an hour; a clean end leaves none."""
    found: dict[str, int] = {}
    for recorded, whose in _events(logs, scene):
        fatal = CATEGORIES[recorded.incident.category].severity is Severity.CRITICAL
        if fatal and whose.engine and time - recorded.time <= DEATH_SECONDS:
            found[whose.engine] = found.get(whose.engine, 0) + 1
    return found


def _events(logs: LogFacts, scene: Scene) -> list[tuple[Recorded, Whose]]:
    """The recent incidents and whose they are, without what a kill of the kernel's explains: it is told twice."""
    owned = [(recorded, owner(recorded, scene)) for recorded in logs.recent]
    kills = [
        (recorded.time, whose)
        for recorded, whose in owned
        if recorded.origin.kind == "kernel" and CATEGORIES[recorded.incident.category].group is Group.HOST_OOM
    ]
    return [
        (recorded, whose)
        for recorded, whose in owned
        if recorded.incident.category not in ENDS
        or not any(abs(time - recorded.time) <= SAME_EVENT_SECONDS and _same(whose, killed) for time, killed in kills)
    ]


def _same(one: Whose, other: Whose) -> bool:
    by_engine = one.engine != "" and one.engine == other.engine
    return by_engine or (one.workload != NO_WORKLOAD and one.workload == other.workload)


def owner(recorded: Recorded, scene: Scene) -> Whose:
    """Engine, GPU and workload of an incident; what is not known is empty."""
    origin, fields = recorded.origin, recorded.incident.fields
    group = CATEGORIES[recorded.incident.category].group.value
    workload = Workload(origin.namespace, origin.pod, origin.container)
    container_id = origin.container_id or _victim(recorded)
    if container_id and scene.containers is not None:
        known = scene.containers.by_id.get(container_id)
        if known is not None:
            workload = Workload(known.namespace, known.pod, known.name)
    pid = fields.get("pid") if origin.kind == "kernel" else None
    engine = origin.engine or _engine(container_id, workload, pid, scene)
    place = _place(fields.get("pci"), engine, scene)
    return Whose(group, engine, place.gpu, place.uuid, workload)


def _victim(recorded: Recorded) -> str:
    """Id of the container whose cgroup the kernel names; empty when it names none."""
    cgroup = recorded.incident.fields.get("cgroup")
    found = workload_of(cgroup) if recorded.origin.kind == "kernel" and isinstance(cgroup, str) else None
    return found[1] if found is not None else ""


def _engine(container_id: str, workload: Workload, pid: object, scene: Scene) -> str:
    for polled in scene.polled:
        found = workload_of(polled.server.cgroup) if polled.server is not None else None
        if container_id and found is not None and found[1] == container_id:
            return polled.name
    for engine in scene.engines:
        if isinstance(pid, int) and pid in engine.pids:
            return engine.name
    if workload == Workload():
        return ""
    holdings = (holding for owned in scene.ownership.values() for holding in owned.holdings)
    return next((h.engine for h in holdings if h.engine is not None and h.workload == workload), "")


NOWHERE = Place("", "")


def _place(pci: object, engine: str, scene: Scene) -> Place:
    """The GPU of a PCI address, else the only one of the engine: an index in a log is the process's own."""
    if isinstance(pci, str):
        return next((gpu.place for gpu in scene.gpus if pci in gpu.pci_bus_id.lower()), NOWHERE)
    places: Iterable[Place] = next((e.places for e in scene.engines if e.name == engine), ())
    only = tuple(places)
    return only[0] if len(only) == 1 else NOWHERE
