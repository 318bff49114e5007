"""May a PID be released? Every refusal with its sentence, and the plan of what may."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_oom_exporter.analysis.releasing import Plan, Question, plan
from gpu_oom_exporter.model import Container, ContainerFacts, NvmlFacts, Process
from tests.analysis.facts import GIB, Thinker, gpu, nvml, on_gpu, process

ID = "b" * 64
BASH = process(400, "bash", 1, session=400, remote=False)


def asked(facts: NvmlFacts, *, containers: ContainerFacts | None = None, seconds: float = 600.0, **more: Any) -> Plan:
    think = Thinker()
    for _ in range(int(seconds / 10)):
        again = NvmlFacts(facts.driver_version, facts.gpus, facts.processes, facts.host_pids, dead=facts.dead)
        report = think(10.0, nvml=again, containers=containers)
    question = {"pid": 7, "own_pids": frozenset({900}), "user": "root", "root": True, "force": False} | more
    return plan(Question(nvml=again, report=report, containers=containers, **question), 20.0)


def one(*processes: Process, kind: str = "compute", **more: Any) -> NvmlFacts:
    return nvml(gpu(on_gpu(7, 10 * GIB, kind)), processes=processes, **more)


def held_by(comm: str = "python3", cgroup: str = "", **more: Any) -> NvmlFacts:
    return one(process(7, comm, 400, cgroup=cgroup, remote=False, user="ann", **more), BASH)


ENGINE = one(
    process(7, "VLLM::EngineCor", 10), process(10, "vllm", 400, argv=("vllm", "serve", "m"), remote=False), BASH
)
POD = ContainerFacts({ID: Container(ID, "vllm", "llm", "vllm-0")}, frozenset())
DOCKER = ContainerFacts({ID: Container(ID, "trainer")}, frozenset({"docker"}))


@pytest.mark.parametrize(
    ("facts", "more", "refusal"),
    [
        (held_by(), {"pid": 1}, "PID 1 is never touched"),
        (held_by(), {"own_pids": frozenset({7})}, "that is this tool, or what started it"),
        (held_by(), {"pid": 8}, "it holds no memory of any GPU that can be seen here"),
        (one(dead=frozenset({7})), {}, "no signal can help: no process is left; drain the GPU"),
        (held_by(state="D", sigkill=True), {}, "no signal can help: SIGKILL is pending"),
        (one(), {}, "who holds GPU 0 is not completely known (a PID that could not be resolved)"),
        (held_by(state="Z"), {}, "it has ended already; its parent 400 must collect it, or end"),
        (held_by(state="Z", children=(33,)), {}, "it has ended already; its child 33 keeps the memory: release 33"),
        (held_by("nv-hostengine"), {}, "it is DCGM's host engine"),
        (held_by("nvidia-persiste"), {}, "it is the persistence daemon"),
        (held_by("nv-fabricmanage"), {}, "it is the fabric manager"),
        (held_by("nvidia-cuda-mps"), {}, "it is MPS, whose end is the end of every client"),
        (one(process(7, "Xorg", 400), BASH, kind="graphics"), {}, "it draws the display"),
        (nvml(gpu(on_gpu(7, 10 * GIB), on_gpu(8)), processes=(process(7, "a", 400), BASH)), {}, "who holds GPU 0 is not completely known"),
        (one(host_pids=False), {}, "who holds GPU 0 is not completely known (no_host_pid)"),
        (held_by(), {"root": False, "user": "bob"}, "it belongs to ann; run as root, or ask them"),
        (held_by(cgroup=f"/system.slice/docker-{ID}.scope"), {"containers": DOCKER}, "it belongs to a container or job that is still there: docker stop trainer"),
        (held_by(cgroup=f"/kubepods.slice/cri-containerd-{ID}.scope"), {"containers": POD}, "it belongs to a pod: kubectl delete pod --namespace llm vllm-0"),
        (held_by(cgroup=f"/kubepods.slice/crio-{ID}.scope"), {}, f"it belongs to a container or job that is still there: crictl stop {ID[:12]}"),
        (held_by(cgroup=f"/machine.slice/libpod-{ID}.scope"), {}, f"it belongs to a container or job that is still there: podman stop {ID[:12]}"),
        (held_by(cgroup="/slurm/uid_1/job_77/step_0"), {}, "it belongs to a container or job that is still there: scancel 77"),
        (held_by(cgroup="/lxc.payload.box/x"), {}, "it belongs to a container or job that is still there: lxc stop box"),
        (ENGINE, {}, "it is part of a living engine; stop the server, or insist with --force"),
    ],
)  # fmt: skip
def test_refusals(facts: NvmlFacts, more: dict[str, Any], refusal: str) -> None:
    """One sentence that says why, and whose command is right."""
    made = asked(facts, **more)
    assert made.refusal.startswith(refusal)
    assert made.steps == ()


def test_plans() -> None:
    """What may be released: an orphan by its root, a gone container's process, a plain process, an engine by force."""
    orphan = one(
        process(7, "VLLM::Worker_TP", 6, session=5, remote=False),
        process(6, "VLLM::EngineCor", 1, session=5, remote=False),
    )
    made = asked(orphan)
    assert (made.refusal, made.target, made.start_ticks, made.used_bytes) == ("", 6, 6, 10 * GIB)
    assert "send SIGTERM to PID 6" in made.steps[1]
    assert any("without an API server" in line for line in made.evidence)
    gone = held_by(cgroup=f"/system.slice/docker-{ID}.scope")
    assert asked(gone, containers=ContainerFacts({}, frozenset({"docker"}))).refusal == ""
    assert asked(held_by()).target == 7
    assert asked(held_by(), root=False, user="ann").refusal == ""
    assert asked(ENGINE, force=True).refusal == ""
    unit = asked(held_by(cgroup="/system.slice/train.service"))
    assert "systemctl stop train.service" in unit.steps[0]
    thread = asked(held_by(state="Z", live_threads=(9,)))
    assert (thread.refusal, thread.target) == ("", 7)
