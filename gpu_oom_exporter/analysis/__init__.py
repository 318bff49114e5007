"""THINK: pure functions, one module per operator question; `think` asks them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_oom_exporter.analysis import engines, headroom, orphans, ownership, recent
from gpu_oom_exporter.analysis.history import History
from gpu_oom_exporter.config import Config
from gpu_oom_exporter.model import (
    Cause,
    Gpu,
    GpuIdentity,
    HostFacts,
    LogFacts,
    MemoryKind,
    NvmlFacts,
    Ownership,
    Place,
    Report,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class State:
    """All state of the daemon. Only the tick replaces it; `history` is bounded and added to by `think` alone."""

    report: Report | None = None
    history: History = field(default_factory=History)
    nvml: NvmlFacts | None = None
    """The newest reading that was judged: one reading seen by two ticks counts once."""


def think(
    snapshot: Snapshot, state: State, config: Config, confirm_seconds: Mapping[Cause, float] | None = None
) -> State:
    """The conclusions from *snapshot*, on top of what *state* remembers.

    *confirm_seconds* replaces how long a suspicion of an orphan must hold: a person at a terminal waits less.
    """
    history, nvml = state.history, snapshot.nvml
    told = engines.judge(snapshot.engines, nvml, history, snapshot.mono, snapshot.host)
    report = Report(
        time=snapshot.time,
        health=snapshot.health,
        engines=told,
        host=snapshot.host,
        tick_lateness_seconds=snapshot.tick_lateness_seconds,
    )
    if nvml is None:
        report = replace(report, ownership=_carried(state, history))
        return State(_with_incidents(report, snapshot), history, None)
    history.blind = 0
    owned = ownership.own(
        ownership.Scene(
            nvml,
            told,
            snapshot.containers,
            config.processes,
            history,
            snapshot.mono,
            nvml is not state.nvml,
            confirm_seconds,
        )
    )
    up, gpus = _inventory(nvml, snapshot.host, history)
    report = replace(
        report,
        gpus=gpus,
        gpu_up={place: claim for place, claim in up.items() if claim is not None},
        recovery_actions={
            ownership.place_of(gpu): gpu.recovery_action
            for gpu in nvml.gpus
            if gpu.up and gpu.recovery_action is not None
        },
        xids=_xids(nvml, snapshot.logs, gpus),
        headroom=headroom.measure(nvml, snapshot.host, told, owned, history, snapshot.mono),
        ownership=owned,
        process_bytes=ownership.by_command(owned, config.processes, history),
    )
    return State(_with_incidents(report, snapshot), history, nvml)


def _xids(nvml: NvmlFacts, logs: LogFacts | None, gpus: Sequence[GpuIdentity]) -> dict[tuple[Place, int], int]:
    """How often each Xid came: by the kernel's messages where they are read, else by NVML's events, never by both."""
    if logs is None or not logs.kernel:
        places = {gpu.place.uuid: gpu.place for gpu in gpus}
        return {(places[x.uuid], x.xid): x.count for x in nvml.xids if x.uuid in places}
    return {
        (gpu.place, xid): count
        for (pci, xid), count in logs.xids.items()
        for gpu in gpus
        if pci in gpu.pci_bus_id.lower()
    }


def _with_incidents(report: Report, snapshot: Snapshot) -> Report:
    """*report* with what the logs tell; without the archive nothing is known, which is not zero."""
    logs = snapshot.logs
    if logs is None:
        return report
    scene = recent.Scene(report.engines, snapshot.engines, report.gpus, report.ownership, snapshot.containers)
    return replace(
        report,
        logs=logs,
        incidents=recent.totals(logs),
        incidents_recent=recent.recent(logs, snapshot.time, scene),
        engine_deaths=recent.deaths(logs, snapshot.time, scene),
    )


def _carried(state: State, history: History) -> dict[Place, Ownership]:
    """Verdicts without a reading: they outlive a few, because an absent sample resets a Prometheus `for`."""
    history.blind += 1
    if state.report is None or history.blind > orphans.INCOMPLETE_READINGS:
        return {}
    return {
        place: Ownership(orphaned=owned.orphaned, orphaned_contexts=owned.orphaned_contexts)
        for place, owned in state.report.ownership.items()
    }


def _inventory(
    nvml: NvmlFacts, host: HostFacts | None, history: History
) -> tuple[dict[Place, bool | None], tuple[GpuIdentity, ...]]:
    """Every GPU on the bus: up, down (no NVML handle), or None while it sleeps; and who it is."""
    up: dict[Place, bool | None] = {}
    identities = []
    listed = {gpu.pci_bus_id for gpu in nvml.gpus}
    missing = [gpu for gpu in (host.gpus if host else ()) if gpu.pci_bus_id not in listed]
    for gpu in nvml.gpus:
        place = ownership.place_of(gpu)
        if gpu.uuid and gpu.pci_bus_id:
            history.names[gpu.pci_bus_id] = (place.gpu, gpu.uuid)
        elif gpu.uuid and missing:  # NVML would not say where it is: one of those that seem missing
            known = next((pci for pci in missing if pci.uuid == gpu.uuid), missing[0])
            missing.remove(known)
            gpu = replace(gpu, pci_bus_id=known.pci_bus_id)
        elif missing:  # NVML counts it and gives no handle; both lists are in bus order
            known = missing.pop(0)
            place = Place(place.gpu, history.names.get(known.pci_bus_id, ("", known.uuid))[1])
            gpu = replace(gpu, pci_bus_id=known.pci_bus_id, name=known.name)
        up[place] = gpu.up
        identities.append(_identity(gpu, place, nvml.driver_version, history))
    for absent in missing:
        index, uuid = history.names.get(absent.pci_bus_id, (absent.pci_bus_id, absent.uuid))
        place = Place(index, uuid)
        up[place] = None if absent.suspended else False
        ghost = Gpu(None, uuid, absent.pci_bus_id, absent.name)
        identities.append(_identity(ghost, place, nvml.driver_version, history))
    return up, tuple(identities)


def _identity(gpu: Gpu, place: Place, driver_version: str, history: History) -> GpuIdentity:
    if gpu.memory_kind is not MemoryKind.UNKNOWN:
        history.kinds[place.uuid] = gpu.memory_kind
    kind = history.kinds.get(place.uuid, gpu.memory_kind)
    device = "" if gpu.minor is None else f"nvidia{gpu.minor}"
    return GpuIdentity(place, gpu.name, gpu.pci_bus_id, device, driver_version, kind)
