"""Which memory will no living thing ever use again? Suspicions per reading, and verdicts that were confirmed.

A suspicion is a fact of one reading. A verdict needs the same suspicion for its cause's time without a break,
and a sum above the floor. Whatever is in doubt is no orphan: being wrong here gets somebody's work killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_oom_exporter.analysis.history import History, Sighting
from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.catalog.engines import ADOPTERS, role_of
from gpu_oom_exporter.model import (
    Cause,
    ContainerFacts,
    Gap,
    Gpu,
    GpuProcess,
    MemoryKind,
    NvmlFacts,
    Process,
)

CONFIRM_SECONDS = {
    Cause.DEAD_PID: 30.0,  # teardown of a big process takes seconds
    Cause.DEFUNCT: 30.0,
    Cause.STUCK: 60.0,
    Cause.ENGINE_ORPHAN: 120.0,  # a clean shutdown of a big engine, server first
    Cause.CONTAINER_GONE: 330.0,  # a runtime that is being restarted forgets for minutes
}
"""How long a suspicion must hold (`design.md` §5)."""

FLOOR_BYTES = 512 * 1024 * 1024
FLOOR_RATIO = 0.02
"""A cause below max(512 MiB, 2 % of the GPU) is not worth a person's time (`design.md` §5)."""

INCOMPLETE_READINGS = 3
"""A verdict survives this many incomplete readings: an absent sample resets a Prometheus `for`."""

NO_VERDICT = frozenset({Gap.NO_HOST_PID, Gap.WDDM, Gap.MPS, Gap.VGPU})
"""Gaps under which nothing can be proven about a PID."""

ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One reading's reason to believe that a process's memory is an orphan."""

    cause: Cause
    evidence: tuple[str, ...]


def suspect(
    gpu: Gpu,
    listed: GpuProcess,
    nvml: NvmlFacts,
    containers: ContainerFacts | None,
    gaps: frozenset[Gap],
    history: History,
) -> Suspicion | None:
    """What this reading says against *listed*, or None. Every rule of the never-list comes first."""
    if gaps & NO_VERDICT or not nvml.host_pids or gpu.memory_kind is MemoryKind.UNIFIED:
        return None
    if listed.kind != "compute":
        return None
    if listed.pid in nvml.dead:
        return Suspicion(Cause.DEAD_PID, (f"NVML lists PID {listed.pid}", "the kernel does not know it (ESRCH)"))
    process = nvml.processes.get(listed.pid)
    if process is None:
        return None
    if process.state == "Z":
        return Suspicion(Cause.DEFUNCT, _kept_by(process))
    if process.frozen or process.state in "Tt":
        return None
    if process.sigkill:
        return _stuck(process)
    return _engine_orphan(process, nvml, history) or _container_gone(process, containers)


def _kept_by(process: Process) -> tuple[str, ...]:
    evidence = ["the process has ended (state Z)"]
    evidence += [f"its thread {thread} still lives" for thread in process.live_threads[:3]]
    evidence += [f"its child {child} still lives" for child in process.children[:3]]
    if len(evidence) == 1:
        evidence.append(f"its parent {process.ppid} has not collected it")
    return tuple(evidence)


def _stuck(process: Process) -> Suspicion | None:
    evidence = [f"SIGKILL is pending and ignored (state {process.state})"]
    if process.stack:
        names = [
            word for word in process.stack.split() if word.startswith(("nvidia", "uvm", "nv_", "_nv", "os_", "rm_"))
        ]
        if not names and "[nvidia" not in process.stack:
            return None  # it waits for something else: a disk, a core dump
        evidence.append(f"kernel stack: {' '.join(names[:3]) or process.stack[:60]}")
    else:
        evidence.append("its kernel stack cannot be read without CAP_SYS_ADMIN")
    return Suspicion(Cause.STUCK, tuple(evidence))


def _engine_orphan(process: Process, nvml: NvmlFacts, history: History) -> Suspicion | None:
    """An engine's worker whose server is gone, with nobody left who could use it."""
    kind = _worker_kind(process, history)
    if kind is None or kind == "ray":  # the engine of a Ray worker may run on another node
        return None
    top = process
    for _ in range(ANCESTORS):
        parent = nvml.processes.get(top.ppid)
        if parent is None or _worker_kind(parent, history) is None:
            break
        top = parent
    adopter = nvml.processes.get(top.ppid)
    if any(serves(ancestor) for ancestor in ancestry(top, nvml)):
        return None
    if top.ppid != 1 and (adopter is None or not _adopts(adopter)):
        return None  # a library whose program lives, or a parent that we cannot see
    for relative in relatives(process, nvml):
        role = role_of(relative.comm, relative.argv)
        if relative.remote is not False:
            return None  # it works with another host (Ray, headless nodes), or we may not look
        if role is not None and role[1] == "child" and serves(relative):
            return None  # an API server that lost its parent still serves
        if role is None and relative.listening and not _adopts(relative):
            return None  # a server that we do not know may be the one it works for
    return Suspicion(
        Cause.ENGINE_ORPHAN,
        (
            f"{kind} worker {process.comm!r} without an API server",
            f"its parent is PID {top.ppid}" + (f" ({adopter.comm})" if adopter is not None else ""),
            "no API server in its session or container, no connection to another host",
        ),
    )


def _worker_kind(process: Process, history: History) -> str | None:
    """The engine whose worker *process* is, by its title, or because it was seen under its server."""
    role = role_of(process.comm, process.argv)
    if role is not None:
        return role[0] if role[1] == "worker" else None
    return history.workers.get((process.pid, process.start_ticks))  # vLLM before 0.10 is a plain python


def _adopts(process: Process) -> bool:
    return process.init or process.comm in ADOPTERS


def serves(process: Process) -> bool:
    """Whether *process* is a living API server, or a child that answers requests for one."""
    role = role_of(process.comm, process.argv)
    return role is not None and role[1] in ("server", "child") and process.state not in "ZX"


def ancestry(process: Process, nvml: NvmlFacts) -> list[Process]:
    """*process*'s ancestors, nearest first."""
    found: list[Process] = []
    parent = nvml.processes.get(process.ppid)
    while parent is not None and len(found) < ANCESTORS:
        found.append(parent)
        parent = nvml.processes.get(parent.ppid)
    return found


def relatives(process: Process, nvml: NvmlFacts) -> list[Process]:
    """*process* and everything of its session or container that was read."""
    container = process.cgroup if workload_of(process.cgroup) is not None else None
    return [
        p
        for p in nvml.processes.values()
        if p.pid == process.pid
        or (process.session and p.session == process.session)
        or (container is not None and p.cgroup == container)
    ]


def _container_gone(process: Process, containers: ContainerFacts | None) -> Suspicion | None:
    workload = workload_of(process.cgroup)
    if containers is None or workload is None:
        return None
    runtime, identity = workload
    if runtime not in containers.complete or identity in containers.by_id:
        return None
    return Suspicion(
        Cause.CONTAINER_GONE,
        (f"its cgroup names {runtime} container {identity[:12]}", f"{runtime} knows no such container"),
    )


def confirm(
    key: tuple[str, str, int, int],
    suspicion: Suspicion | None,
    history: History,
    mono: float,
    seconds: Mapping[Cause, float] | None = None,
) -> Suspicion | None:
    """*suspicion* once it has held for its cause's time; *key* is the place and the process (PID, start).

    Another cause of the same process goes on from the first one's time: a killed worker that becomes a zombie
    has not come back to life in between.
    """
    if suspicion is None:
        history.sightings.pop(key, None)
        return None
    seen = history.sightings.get(key)
    if seen is None:
        seen = history.sightings[key] = Sighting(mono)
    needed = (seconds or CONFIRM_SECONDS)[suspicion.cause]
    return suspicion if mono - seen.since >= needed else None


def remember_workers(nvml: NvmlFacts, history: History, pids: set[int]) -> None:
    """Note which of *pids* run under an API server now: should the server die, they are its workers."""
    for pid in pids:
        process = nvml.processes.get(pid)
        if process is None or role_of(process.comm, process.argv) is not None:
            continue
        for ancestor in ancestry(process, nvml):
            role = role_of(ancestor.comm, ancestor.argv)
            if role is not None and role[1] == "server":
                history.workers[process.pid, process.start_ticks] = role[0]
                break
    alive = {(p.pid, p.start_ticks) for p in nvml.processes.values()}
    for key in history.workers.keys() - alive:
        del history.workers[key]


def floor_bytes(total_bytes: int | None) -> int:
    """What a cause must come to on a GPU of *total_bytes* to be told."""
    return max(FLOOR_BYTES, int(FLOOR_RATIO * (total_bytes or 0)))
