"""May this PID's memory be released, and how? The plan, or the one sentence that says why not.

Every refusal of the design is a row of `REFUSALS`, asked in order; the first that has something to say ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_oom_exporter.analysis.orphans import ancestry, serves
from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.catalog.engines import role_of
from gpu_oom_exporter.catalog.remedies import remedies
from gpu_oom_exporter.model import (
    Cause,
    ContainerFacts,
    Holder,
    Holding,
    NvmlFacts,
    Place,
    Process,
    Report,
)

SERVICES = {
    "nvidia-cuda-mps": "MPS, whose end is the end of every client: echo quit | nvidia-cuda-mps-control",
    "nv-hostengine": "DCGM's host engine; stop the service: systemctl stop nvidia-dcgm",
    "nvidia-persiste": "the persistence daemon; stop the service: systemctl stop nvidia-persistenced",
    "nv-fabricmanage": "the fabric manager; without it NVSwitch systems need a new start of every GPU",
}
"""Programs that belong to the driver's own plumbing, by the 15 bytes of comm."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything the answer depends on."""

    pid: int
    nvml: NvmlFacts
    report: Report
    containers: ContainerFacts | None
    own_pids: frozenset[int]
    user: str
    root: bool
    force: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done to `target`, which is the PID or the root of its orphaned tree; or the refusal."""

    pid: int
    target: int
    refusal: str = ""
    steps: tuple[str, ...] = ()
    start_ticks: int = 0
    cgroup: str = ""
    used_bytes: int = 0
    places: tuple[Place, ...] = ()
    evidence: tuple[str, ...] = field(default=())


def plan(question: Question, grace_seconds: float) -> Plan:
    """The plan for *question*, or a plan that is only a refusal."""
    held = holdings(question)
    process = question.nvml.processes.get(question.pid)
    for refuse in REFUSALS:
        refusal = refuse(question, process, held)
        if refusal:
            return Plan(question.pid, question.pid, refusal)
    assert process is not None  # `_unseen` refused otherwise
    target = _root(process, question.nvml) if any(h.cause is Cause.ENGINE_ORPHAN for _, h in held) else process
    steps = []
    owner = _unit(target)
    if owner:
        steps.append(f"better, if it is still wanted under control: systemctl stop {owner} (not run by this tool)")
    steps += [
        f"verify that PID {target.pid} ({target.comm}) is still the same process, on the same GPU",
        f"send SIGTERM to PID {target.pid}, wait up to {grace_seconds:g} s",
        f"if it is still there: verify again, send SIGKILL to PID {target.pid}",
        "measure the memory until it has settled, and report what was freed",
    ]
    return Plan(
        question.pid,
        target.pid,
        "",
        tuple(steps),
        target.start_ticks,
        target.cgroup,
        sum(h.used_bytes for _, h in held),
        tuple(place for place, _ in held),
        tuple(dict.fromkeys(line for _, h in held for line in h.evidence)),
    )


def holdings(question: Question) -> list[tuple[Place, Holding]]:
    """Where the PID holds memory."""
    return [(p, h) for p, owned in question.report.ownership.items() for h in owned.holdings if h.pid == question.pid]


def _root(process: Process, nvml: NvmlFacts) -> Process:
    """The topmost worker above *process*: the others end when it does."""
    top = process
    for ancestor in ancestry(process, nvml):
        role = role_of(ancestor.comm, ancestor.argv)
        if role is None or role[1] != "worker":
            break
        top = ancestor
    return top


def _unit(process: Process) -> str:
    workload = workload_of(process.cgroup)
    return workload[1] if workload is not None and workload[0] == "systemd" else ""


Held = list[tuple[Place, Holding]]


def _init(question: Question, process: Process | None, held: Held) -> str:
    return "PID 1 is never touched" if question.pid == 1 else ""


def _ourselves(question: Question, process: Process | None, held: Held) -> str:
    return "that is this tool, or what started it" if question.pid in question.own_pids else ""


def _nothing_held(question: Question, process: Process | None, held: Held) -> str:
    return "" if held else "it holds no memory of any GPU that can be seen here"


def _no_signal(question: Question, process: Process | None, held: Held) -> str:
    for place, holding in held:
        if holding.cause in (Cause.DEAD_PID, Cause.STUCK):
            return "; ".join(remedies(holding, place.uuid))
    return ""


def _unseen(question: Question, process: Process | None, held: Held) -> str:
    return "" if process is not None else "/proc does not show it, so nothing about it can be verified"


def _zombie(question: Question, process: Process | None, held: Held) -> str:
    if process is None or process.state != "Z" or process.live_threads:
        return ""
    if process.children:
        return f"it has ended already; its child {process.children[0]} keeps the memory: release {process.children[0]}"
    return f"it has ended already; its parent {process.ppid} must collect it, or end"


def _plumbing(question: Question, process: Process | None, held: Held) -> str:
    if process is not None and process.comm in SERVICES:
        return f"it is {SERVICES[process.comm]}"
    return ""


def _graphics(question: Question, process: Process | None, held: Held) -> str:
    shown = any(h.holder is Holder.GRAPHICS for _, h in held)
    return "it draws the display; end the session, or: systemctl set-default multi-user.target" if shown else ""


def _incomplete(question: Question, process: Process | None, held: Held) -> str:
    for place, _ in held:
        owned = question.report.ownership[place]
        hidden = any(h.pid not in question.nvml.processes and h.pid not in question.nvml.dead for h in owned.holdings)
        if owned.seen_gaps or hidden or not owned.complete:
            why = ", ".join(sorted(gap.value for gap in owned.seen_gaps)) or "a PID that could not be resolved"
            return f"who holds GPU {place.gpu} is not completely known ({why}), so it may be the wrong one"
    return ""


def _somebody_elses(question: Question, process: Process | None, held: Held) -> str:
    if process is None or question.root or process.user == question.user:
        return ""
    return f"it belongs to {process.user}; run as root, or ask them"


def _contained(question: Question, process: Process | None, held: Held) -> str:
    workload = workload_of(process.cgroup) if process is not None else None
    if workload is None or workload[0] in ("systemd",) or any(h.cause is Cause.CONTAINER_GONE for _, h in held):
        return ""
    runtime, identity = workload
    known = question.containers.by_id.get(identity) if question.containers is not None else None
    if known is not None and known.pod:
        return f"it belongs to a pod: kubectl delete pod --namespace {known.namespace} {known.pod}"
    name = known.name if known is not None else identity[:12]
    commands = {
        "docker": f"docker stop {name}",
        "podman": f"podman stop {name}",
        "containerd": f"crictl stop {identity[:12]}",
        "crio": f"crictl stop {identity[:12]}",
        "lxc": f"lxc stop {identity}",
        "slurm": f"scancel {identity}",
    }
    return f"it belongs to a container or job that is still there: {commands[runtime]}"


def _serving(question: Question, process: Process | None, held: Held) -> str:
    if process is None or question.force or any(h.cause is not None for _, h in held):
        return ""
    engine = next((h.engine for _, h in held if h.engine), None)
    line = [process, *ancestry(process, question.nvml)]
    if engine is None and not any(serves(p) for p in line) and role_of(process.comm, process.argv) is None:
        return ""
    return f"it is part of a living engine{f' ({engine})' if engine else ''}; stop the server, or insist with --force"


REFUSALS: tuple[Callable[[Question, Process | None, Held], str], ...] = (
    _init,
    _ourselves,
    _nothing_held,
    _no_signal,
    _plumbing,
    _graphics,
    _incomplete,
    _unseen,
    _zombie,
    _somebody_elses,
    _contained,
    _serving,
)
