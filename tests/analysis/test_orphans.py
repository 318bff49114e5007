"""Orphans: one table of causes and look-alikes, each row naming its row of the decision table it stands for.

The rows are those of `docs/orphans.md`; a verdict is what is left after the cause's confirmation time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gpu_oom_exporter.analysis.orphans import CONFIRM_SECONDS, FLOOR_BYTES
from gpu_oom_exporter.model import (
    Answer,
    Cause,
    Container,
    ContainerFacts,
    EngineRank,
    Gap,
    Holder,
    MemoryKind,
    NvmlFacts,
    Process,
)
from tests.analysis.facts import GIB, MIB, PLACE, PLACES, Thinker, engine, gpu, nvml, on_gpu, process

ID = "a" * 64
DOCKER = f"/system.slice/docker-{ID}.scope"
KUBE = f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope"
VLLM = ("/usr/bin/python3", "/usr/bin/vllm", "serve", "m")
SGLANG = ("python3", "-m", "sglang.launch_server", "--model", "m")


def worker(pid: int = 7, ppid: int = 1, comm: str = "VLLM::EngineCor", **more: Any) -> Process:
    return process(pid, comm, ppid, **{"session": 500, "remote": False, "listening": frozenset(), **more})


def one(*processes: Process, pid: int = 7, **more: Any) -> NvmlFacts:
    """One GPU of which *pid* holds 10 GiB."""
    return nvml(gpu(on_gpu(pid, 10 * GIB)), processes=processes, **more)


BASH = process(400, "bash", 1, session=400, remote=False)
SHIM = process(401, "containerd-shim", 1, session=401, remote=False)
INIT = process(402, "sh", 1, session=402, remote=False, init=True)
SYSTEMD_USER = process(403, "systemd", 1, session=403, remote=False)

ROWS: list[tuple[str, str, NvmlFacts, Cause | None, Holder]] = [
    # --- row 17: a PID that nobody has
    ("17", "dead PID", one(dead=frozenset({7})), Cause.DEAD_PID, Holder.ORPHAN),
    ("3", "a PID that is hidden from us (hidepid): it exists", one(), None, Holder.UNATTRIBUTED),
    ("3", "a dead PID seen from another PID namespace", one(dead=frozenset({7}), host_pids=False), None, Holder.PROCESS),
    ("9", "a dead PID of a display", nvml(gpu(on_gpu(7, 10 * GIB, "graphics")), dead=frozenset({7})), None, Holder.GRAPHICS),
    ("8", "a dead PID under MPS", nvml(gpu(on_gpu(7, 10 * GIB), on_gpu(8)), processes=(process(8, "nvidia-cuda-mps"),), dead=frozenset({7})), None, Holder.UNATTRIBUTED),
    ("11", "a dead PID on a vGPU host", nvml(gpu(on_gpu(7, 10 * GIB), gaps=frozenset({Gap.VGPU})), dead=frozenset({7})), None, Holder.UNATTRIBUTED),
    ("13", "a dead PID under WSL", nvml(gpu(on_gpu(7, 10 * GIB), gaps=frozenset({Gap.WDDM})), dead=frozenset({7})), None, Holder.UNATTRIBUTED),
    ("12", "a dead PID on unified memory", nvml(gpu(on_gpu(7, 10 * GIB), memory=None, memory_kind=MemoryKind.UNIFIED), dead=frozenset({7})), None, Holder.UNATTRIBUTED),
    # --- row 5: zombies
    ("5", "a zombie whose thread lives", one(process(7, "python3", 400, state="Z", live_threads=(9,)), BASH), Cause.DEFUNCT, Holder.ORPHAN),
    ("5", "a zombie whose child lives", one(process(7, "python3", 400, state="Z", children=(10,)), BASH), Cause.DEFUNCT, Holder.ORPHAN),
    ("5", "a zombie that was not collected", one(process(7, "python3", 400, state="Z"), BASH), Cause.DEFUNCT, Holder.ORPHAN),
    ("9", "a zombie of a display", nvml(gpu(on_gpu(7, 10 * GIB, "graphics")), processes=(process(7, "Xorg", state="Z"),)), None, Holder.GRAPHICS),
    # --- row 6: stuck in the driver
    ("6", "SIGKILL ignored in D", one(process(7, "python3", state="D", sigkill=True)), Cause.STUCK, Holder.ORPHAN),
    ("6", "SIGKILL ignored in R, in the driver", one(process(7, "python3", state="R", sigkill=True, stack="uvm_spin_loop+0x10 [nvidia_uvm]")), Cause.STUCK, Holder.ORPHAN),
    ("6", "SIGKILL ignored in D, in a disk", one(process(7, "python3", state="D", sigkill=True, stack="nfs_wait+0x10 rpc_wait+0x2")), None, Holder.PROCESS),
    ("6", "D state without SIGKILL is a wait", one(process(7, "python3", state="D")), None, Holder.PROCESS),
    ("4", "SIGKILL pending in a frozen cgroup (v1)", one(process(7, "python3", state="D", sigkill=True, frozen=True)), None, Holder.SUSPENDED),
    # --- row 4: suspended
    ("4", "stopped", one(worker(state="T")), None, Holder.SUSPENDED),
    ("4", "traced", one(process(7, "python3", state="t")), None, Holder.SUSPENDED),
    ("4", "docker pause (v2: state S)", one(worker(frozen=True)), None, Holder.SUSPENDED),
    # --- row 1: an engine without its server
    ("1", "vLLM worker at PID 1", one(worker()), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "vLLM worker at a container's init", one(worker(ppid=402, cgroup=DOCKER), INIT), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "vLLM worker at a subreaper", one(worker(ppid=403), SYSTEMD_USER), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "vLLM worker at the shim", one(worker(ppid=401), SHIM), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "a TP worker under an orphaned EngineCore", one(worker(ppid=6, comm="VLLM::Worker_TP"), worker(6)), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "a title that is only in argv", one(worker(comm="python3", argv=("VLLM::EngineCore_DP0",))), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "SGLang scheduler at PID 1", one(worker(comm="sglang::schedul", argv=("sglang::scheduler_TP0",))), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "TGI shard at PID 1", one(worker(comm="text-generation", argv=("python", "/opt/text-generation-server", "serve"))), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "an old server's orphan beside a new server in one shell", one(worker(), process(20, "vllm", 400, argv=VLLM, session=500, remote=False), BASH), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    # --- its look-alikes
    ("14", "vLLM under its server", one(worker(ppid=10), process(10, "vllm", 400, argv=VLLM), BASH), None, Holder.ENGINE),
    ("14", "a TP worker under its server", one(worker(ppid=6, comm="VLLM::Worker_TP"), worker(6, 10), process(10, "vllm", 1, argv=VLLM)), None, Holder.ENGINE),
    ("1", "a server that still loads has no listener yet", one(worker(ppid=10), process(10, "vllm", 1, argv=VLLM, listening=frozenset())), None, Holder.ENGINE),
    ("14", "a server in a pod with a sidecar of another container", one(worker(ppid=10, cgroup=KUBE), process(10, "vllm", 402, argv=VLLM, cgroup=KUBE, session=402), INIT, process(60, "istio-proxy", 1, session=601, remote=True)), None, Holder.ENGINE),
    ("1", "an orphan in a pod whose sidecar talks to the world", one(worker(ppid=402, cgroup=KUBE), INIT, process(60, "istio-proxy", 1, session=601, remote=True)), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "multi-API stack that lost its parent still serves", one(worker(), process(21, "VLLM::APIServer", 1, session=500, remote=False)), None, Holder.ENGINE),
    ("1", "the same in a container, another session", one(worker(cgroup=DOCKER), process(21, "VLLM::APIServer", 1, session=501, remote=False, cgroup=DOCKER)), None, Holder.ENGINE),
    ("1", "a zombie API server serves nobody", one(worker(), process(21, "VLLM::APIServer", 1, session=500, remote=False, state="Z")), Cause.ENGINE_ORPHAN, Holder.ORPHAN),
    ("1", "a library LLM() whose program lives", one(worker(ppid=30), process(30, "python3", 400, argv=("python3", "eval.py")), BASH), None, Holder.ENGINE),
    ("1", "a headless node: connected to another host", one(worker(remote=True)), None, Holder.ENGINE),
    ("1", "a relative is connected to another host", one(worker(), process(22, "python3", 1, session=500, remote=True)), None, Holder.ENGINE),
    ("1", "a relative that we do not know listens", one(worker(), process(22, "python3", 1, session=500, remote=False, listening=frozenset({8000}))), None, Holder.ENGINE),
    ("1", "connections we may not look at", one(worker(remote=None)), None, Holder.ENGINE),
    ("1", "a parent we cannot see", one(worker(ppid=4711)), None, Holder.ENGINE),
    ("1", "Ray's worker", one(worker(comm="ray::RayWorkerWr", ppid=40), process(40, "raylet", 1, argv=("raylet",))), None, Holder.ENGINE),
    ("1", "Ray's worker at PID 1", one(worker(comm="ray::RayWorkerWr")), None, Holder.ENGINE),
    ("14", "SGLang under its server", one(worker(ppid=11, comm="sglang::schedul"), process(11, "python3", 400, argv=SGLANG), BASH), None, Holder.ENGINE),
    ("1", "SGLang's HTTP process retitled", one(worker(comm="sglang::schedul"), process(12, "sglang::http_se", 1, session=500, remote=False)), None, Holder.ENGINE),
    ("1", "a TGI shard whose router lives", one(worker(comm="text-generation", argv=("text-generation-server", "serve")), process(13, "text-generation", 1, argv=("text-generation-router",), session=500, remote=False)), None, Holder.ENGINE),
    ("14", "Ollama's llama-server answers requests itself", one(worker(comm="llama-server", argv=("/usr/bin/llama-server", "--port", "4123"))), None, Holder.ENGINE),
    ("14", "Ollama's older runner", one(worker(comm="ollama", argv=("/usr/bin/ollama", "runner", "--port", "4123"))), None, Holder.ENGINE),
    ("14", "a notebook at PID 1", one(process(7, "python3", 1, argv=("python3", "-m", "ipykernel_launcher"), session=500, remote=False)), None, Holder.PROCESS),
    ("14", "a plain python at PID 1, never seen under a server", one(worker(comm="python", argv=("python", "-c", "from multiprocessing.spawn import spawn_main"))), None, Holder.PROCESS),
    ("10", "a small context of a monitoring tool", nvml(gpu(on_gpu(7, 300 * MIB)), dead=frozenset({7})), None, Holder.UNATTRIBUTED),
]  # fmt: skip


def verdict(think: Thinker, facts: NvmlFacts, seconds: float, **more: Any) -> tuple[Cause | None, Holder]:
    """What is held against PID 7 after *seconds* of the same facts, read every ten seconds."""
    for _ in range(int(seconds / 10) + 1):
        again = NvmlFacts(facts.driver_version, facts.gpus, facts.processes, facts.host_pids, dead=facts.dead)
        report = think(10.0, nvml=again, **more)
    holding = next(h for h in report.ownership[PLACE].holdings if h.pid == 7)
    return holding.cause, holding.holder


def test_the_table_is_long_enough() -> None:
    """At least forty rows, of both kinds."""
    assert len(ROWS) >= 40
    assert {cause for _, _, _, cause, _ in ROWS} >= {
        None,
        Cause.DEAD_PID,
        Cause.DEFUNCT,
        Cause.STUCK,
        Cause.ENGINE_ORPHAN,
    }


@pytest.mark.parametrize(("row", "what", "facts", "cause", "holder"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
def test_table(row: str, what: str, facts: NvmlFacts, cause: Cause | None, holder: Holder) -> None:
    """Cause × look-alike: the verdict after ten minutes, and the holder."""
    assert verdict(Thinker(), facts, 600.0) == (cause, holder)


@pytest.mark.parametrize(
    ("row", "what", "facts", "cause", "holder"), [r for r in ROWS if r[3]], ids=[r[1] for r in ROWS if r[3]]
)
def test_confirmation(row: str, what: str, facts: NvmlFacts, cause: Cause, holder: Holder) -> None:
    """No verdict before its cause's time; after it the evidence says why, and the sums agree."""
    think = Thinker()
    needed = CONFIRM_SECONDS[cause]
    assert verdict(think, facts, needed - 10.0)[0] is None
    assert verdict(think, facts, 10.0)[0] is cause
    report = think.state.report
    assert report is not None
    owned = report.ownership[PLACE]
    (holding,) = [h for h in owned.holdings if h.cause]
    assert len(holding.evidence) >= 2
    assert owned.held is not None
    assert owned.orphaned is not None
    assert sum(owned.orphaned.values()) == owned.held[Holder.ORPHAN] == 10 * GIB
    assert owned.orphaned_contexts is not None
    assert owned.orphaned_contexts[cause] == 1


def containers(*ids: str, complete: str = "docker") -> ContainerFacts:
    return ContainerFacts({i: Container(i, "vllm") for i in ids}, frozenset({complete} - {""}))


@pytest.mark.parametrize(
    ("row", "cgroup", "facts", "cause"),
    [
        ("2", DOCKER, containers(), Cause.CONTAINER_GONE),
        ("2", DOCKER, containers(ID), None),
        ("2", DOCKER, containers(complete=""), None),
        ("2", DOCKER, None, None),
        ("2", KUBE, containers(), None),
        ("2", "/system.slice/train.service", containers(), None),
        ("2", "/user.slice/user-0.slice/session-1.scope", containers(), None),
    ],
)
def test_container_gone(row: str, cgroup: str, facts: ContainerFacts | None, cause: Cause | None) -> None:
    """Only a runtime that listed everything, asked about its own container, proves anything."""
    host = one(process(7, "python3", 400, cgroup=cgroup), BASH)
    assert verdict(Thinker(), host, 600.0, containers=facts)[0] is cause


def test_a_runtime_that_restarts() -> None:
    """A container that is back within the time was never gone."""
    think = Thinker()
    host = one(process(7, "python3", 400, cgroup=DOCKER), BASH)
    assert verdict(think, host, 300.0, containers=containers())[0] is None
    assert verdict(think, host, 0.0, containers=containers(ID))[0] is None
    assert verdict(think, host, 300.0, containers=containers())[0] is None


def test_old_vllm_is_known_by_its_server() -> None:
    """Before 0.10 a worker is a plain python: seen under its server, it is its orphan when the server is gone."""
    plain = {"comm": "python", "argv": ("python", "-c", "from multiprocessing.spawn import spawn_main")}
    think = Thinker()
    server = process(10, "python3", 400, argv=("python3", "-m", "vllm.entrypoints.openai.api_server"), session=500)
    assert verdict(think, one(worker(ppid=10, **plain), server, BASH), 60.0)[0] is None
    orphan = one(worker(ppid=1, **plain))
    assert verdict(think, orphan, 110.0)[0] is None
    assert verdict(think, orphan, 10.0) == (Cause.ENGINE_ORPHAN, Holder.ORPHAN)


def test_a_reused_pid_is_somebody_else() -> None:
    """A new process with the PID of one under suspicion begins anew."""
    think = Thinker()
    assert verdict(think, one(worker(start_ticks=1)), 110.0)[0] is None
    assert verdict(think, one(worker(start_ticks=2)), 110.0)[0] is None
    assert verdict(think, one(worker(start_ticks=2)), 10.0)[0] is Cause.ENGINE_ORPHAN


def test_a_killed_worker_goes_on_being_an_orphan() -> None:
    """Stuck, then a zombie: the time under suspicion does not begin again with the new cause."""
    think = Thinker()
    assert verdict(think, one(process(7, "python3", state="D", sigkill=True)), 50.0)[0] is None
    assert verdict(think, one(process(7, "python3", state="Z")), 0.0)[0] is Cause.DEFUNCT


def test_life_ends_suspicion() -> None:
    """One reading in which it is well again, and it is well."""
    think = Thinker()
    assert verdict(think, one(worker()), 200.0)[0] is Cause.ENGINE_ORPHAN
    child = process(21, "VLLM::APIServer", 1, session=500, remote=False)
    assert verdict(think, one(worker(), child), 0.0)[0] is None


def test_a_verdict_survives_three_incomplete_readings() -> None:
    """An absent sample resets a Prometheus `for`: the sums live on for three readings, then they are withdrawn."""
    think = Thinker()
    verdict(think, one(worker()), 200.0)
    told = []
    for _ in range(4):
        report = think(1.0, nvml=nvml(gpu(processes=None)))
        orphaned = report.ownership[PLACE].orphaned
        told.append(None if orphaned is None else orphaned[Cause.ENGINE_ORPHAN])
    assert told == [10 * GIB, 10 * GIB, 10 * GIB, None]


def test_the_floor_is_per_cause() -> None:
    """Two small orphans of one cause count together; the floor is 2 % on a big GPU."""
    small = FLOOR_BYTES + GIB // 2
    facts = nvml(gpu(on_gpu(7, small), on_gpu(8, small)), dead=frozenset({7, 8}))
    assert verdict(Thinker(), facts, 60.0)[0] is Cause.DEAD_PID, "2 GiB of 80: above 2 %"
    facts = nvml(gpu(on_gpu(7, small)), dead=frozenset({7}))
    assert verdict(Thinker(), facts, 60.0)[0] is None


def test_below_the_floor_it_is_what_it_was() -> None:
    """A small engine without its server stays an engine."""
    small = nvml(gpu(on_gpu(7, FLOOR_BYTES // 2)), processes=(worker(),))
    assert verdict(Thinker(), small, 600.0) == (None, Holder.ENGINE)


def test_nothing_is_claimed_on_another_gpu() -> None:
    """Each GPU is judged alone."""
    facts = nvml(
        gpu(on_gpu(7, 10 * GIB)), gpu(on_gpu(8, 10 * GIB), index=1), processes=(process(8),), dead=frozenset({7})
    )
    think = Thinker()
    verdict(think, facts, 60.0)
    report = think.state.report
    assert report is not None
    assert [report.ownership[p].orphaned[Cause.DEAD_PID] for p in PLACES[:2]] == [10 * GIB, 0]  # type: ignore[index]


def test_no_orphan_metric_without_proof() -> None:
    """Where nothing can be proven there is no zero either."""
    report = Thinker()(nvml=nvml(gpu(on_gpu(7)), host_pids=False))
    assert report.ownership[PLACE].orphaned is None


@pytest.mark.parametrize(
    ("sm", "allow", "hours", "idle"),
    [
        (0.0, (), 6.1, 10 * GIB),
        (0.0, (), 5.9, 0),
        (0.01, (), 6.1, 0),
        (None, (), 6.1, None),
        (0.0, ("jup*",), 6.1, 0),
    ],
)
def test_idle_holders(sm: float | None, allow: tuple[str, ...], hours: float, idle: int | None) -> None:
    """Six hours without activity, unless the command is allowed to, or nobody can tell."""
    think = Thinker(processes={"idle_allow": allow})
    facts = nvml(gpu(on_gpu(7, 10 * GIB, sm=sm)), processes=(process(7, "jupyter"),))
    think(nvml=facts)
    assert think(hours * 3600, nvml=facts).ownership[PLACE].idle_bytes == idle


def test_idle_engines_are_no_idle_holders() -> None:
    """An engine without requests is a panel, not an accusation."""
    facts = one(worker(ppid=10), process(10, "vllm", 1, argv=VLLM))
    think = Thinker()
    think(nvml=facts)
    assert think(7 * 3600.0, nvml=facts).ownership[PLACE].idle_bytes == 0


SERVER = (process(10, "vllm", listening=frozenset({8000})), process(11, "VLLM::EngineCor", 10))


def serving(*more: tuple[int, int, str]) -> NvmlFacts:
    extra = [on_gpu(pid, used) for pid, used, _ in more]
    return nvml(
        gpu(on_gpu(11, 30 * GIB), *extra, used=40 * GIB),
        processes=(*SERVER, *(process(pid, comm) for pid, _, comm in more)),
    )


def test_newcomers() -> None:
    """Who was there when the engine became ready is at home; who comes later is new, unless allowed."""
    think = Thinker(processes={"cotenant_allow": ("dcgm*",)})
    ready = {"engines": (engine(),)}
    assert think(nvml=serving((50, GIB, "old")), **ready).ownership[PLACE].newcomer_bytes == 0
    later = serving((50, GIB, "old"), (51, 2 * GIB, "python3"), (52, GIB, "dcgm-exporter"))
    assert think(nvml=later, **ready).ownership[PLACE].newcomer_bytes == 2 * GIB
    asleep = {"engines": (engine(ranks=(EngineRank("0", asleep=True),)),)}
    assert think(nvml=later, **asleep).ownership[PLACE].newcomer_bytes is None
    assert think(nvml=later, engines=(engine(answer=Answer.REFUSED),)).ownership[PLACE].newcomer_bytes is None
    assert think(nvml=later, **ready).ownership[PLACE].newcomer_bytes == 0, "a new life begins with who is there"


@pytest.mark.parametrize(
    ("facts", "engines", "overcommit"),
    [
        (serving(), (engine(),), 0),
        (serving((50, 20 * GIB, "x")), (engine(),), math.ceil(79 * GIB * 0.9) + 20 * GIB - 79 * GIB),
        (serving((50, 20 * GIB, "x")), (), None),
        (serving((50, 20 * GIB, "x")), (engine(ranks=(EngineRank("0"),)),), None),
    ],
)
def test_overcommit(facts: NvmlFacts, engines: tuple[Any, ...], overcommit: int | None) -> None:
    """Budgets of awake engines plus everybody else's bytes over the total; absent when a term is unknown."""
    assert Thinker()(nvml=facts, engines=engines).ownership[PLACE].overcommit_bytes == overcommit


def test_names() -> None:
    """Container and pod names reach the holder; missing names cost only themselves."""
    facts = one(process(7, "python3", 400, cgroup=KUBE), BASH)
    known = ContainerFacts({ID: Container(ID, "vllm", "llm", "vllm-0")})
    holding: Callable[[Any], Any] = lambda c: Thinker()(nvml=facts, containers=c).ownership[PLACE].holdings[0]  # noqa: E731
    named = holding(known)
    assert (named.container, named.workload.namespace, named.workload.pod) == ("vllm", "llm", "vllm-0")
    assert holding(None).container == f"containerd:{ID[:12]}"


def test_ipc_importers_are_named() -> None:
    """A process that was there before a watched engine ended, and has what it had, is named; it is no orphan."""
    think = Thinker()
    both = nvml(
        gpu(on_gpu(7, 10 * GIB), on_gpu(8, 10 * GIB)),
        processes=(worker(ppid=10), process(10, "vllm", 1, argv=VLLM), process(8, "lmcache")),
    )
    think(nvml=both)
    think(nvml=both)
    later = nvml(gpu(on_gpu(8, 10 * GIB + 50 * MIB)), processes=(process(8, "lmcache"),))
    (holding,) = think(nvml=later).ownership[PLACE].holdings
    assert (holding.holder, holding.cause) == (Holder.PROCESS, None)
    assert "PID 7" in holding.evidence[0]
    other = nvml(gpu(on_gpu(8, 11 * GIB)), processes=(process(8, "lmcache"),))
    assert think(nvml=other).ownership[PLACE].holdings[0].evidence == (), "10 % more is something else"
    assert think(4000.0, nvml=later).ownership[PLACE].holdings[0].evidence == (), "an hour later it says nothing"


def test_a_verdict_survives_three_blind_ticks() -> None:
    """NVML cannot be read at all: the sums live on for three ticks, and nothing else does."""
    think = Thinker()
    verdict(think, one(worker()), 200.0)
    told = [think(1.0).ownership.get(PLACE) for _ in range(4)]
    sums = [owned.orphaned[Cause.ENGINE_ORPHAN] if owned and owned.orphaned else None for owned in told]
    assert sums == [10 * GIB, 10 * GIB, 10 * GIB, None]
    assert told[0] is not None
    assert (told[0].held, told[0].holdings, told[0].complete) == (None, (), None)
    assert verdict(think, one(worker()), 0.0)[0] is Cause.ENGINE_ORPHAN, "the time under suspicion goes on"
