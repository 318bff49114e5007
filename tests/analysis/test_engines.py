"""What each engine is doing, and on which GPUs."""

from __future__ import annotations

import math

import pytest

from gpu_oom_exporter.model import Answer, EngineRank, EngineState, GpuInstance, HostFacts, Memory, Place
from tests.analysis.facts import GIB, PLACE, PLACES, Thinker, engine, gpu, nvml, on_gpu, process

ASLEEP = EngineRank("0", kv_used_ratio=0.0, kv_capacity_tokens=100, asleep=True, gpu_memory_utilization=0.9)
LOADING = process(50, "vllm", argv=("vllm", "serve", "m", "--gpu-memory-utilization", "0.8"))


@pytest.mark.parametrize(
    ("facts", "state", "up", "expected_up", "stats"),
    [
        (engine(), EngineState.READY, True, True, True),
        (engine(ranks=(ASLEEP,)), EngineState.ASLEEP, True, True, True),
        (engine(ranks=(ASLEEP, EngineRank("1"))), EngineState.READY, True, True, True),
        (engine(ranks=()), EngineState.NO_STATS, True, True, False),
        (engine(answer=Answer.UNAUTHORIZED), EngineState.UNAUTHORIZED, True, True, None),
        (engine(answer=Answer.REFUSED), EngineState.DOWN, False, False, None),
        (engine(answer=Answer.REFUSED, server=LOADING), EngineState.LOADING, False, True, None),
        (engine(answer=Answer.FAILED), EngineState.UNREACHABLE, False, False, None),
        (engine(answer=Answer.NOT_METRICS), EngineState.UNREACHABLE, False, False, None),
        (engine(answer=Answer.REFUSED, declared=False), EngineState.DOWN, False, None, None),
    ],
)
def test_states(facts: object, state: EngineState, up: bool, expected_up: bool | None, stats: bool | None) -> None:
    """Every way to answer is one state; a declared engine that loads is not down."""
    (report,) = Thinker()(engines=(facts,)).engines
    assert (report.state, report.up, report.expected_up, report.stats_enabled) == (state, up, expected_up, stats)


def tree() -> tuple[object, ...]:
    """vllm serve → EngineCore → two TP workers, and a stranger."""
    return (
        process(10, "vllm", listening=frozenset({8000})),
        process(11, "VLLM::EngineCor", 10),
        process(12, "VLLM::Worker_TP", 11),
        process(13, "VLLM::Worker_TP", 11),
        process(99, "python3", 1, listening=frozenset({9999})),
    )


def test_join_by_process_tree() -> None:
    """An engine's GPUs are those where descendants of its listener hold memory."""
    facts = nvml(gpu(on_gpu(12)), gpu(on_gpu(13), index=1), gpu(on_gpu(99), index=2), processes=tree())
    (report,) = Thinker()(nvml=facts, engines=(engine(),)).engines
    assert report.places == tuple(PLACES[:2])
    assert report.pids == {12, 13}


@pytest.mark.parametrize(
    "more",
    [
        {"local": False},
        {"port": 8001},
    ],
)
def test_no_join_without_proof(more: dict[str, object]) -> None:
    """An address elsewhere, or another port, joins nothing."""
    facts = nvml(gpu(on_gpu(12)), processes=tree())
    (report,) = Thinker()(nvml=facts, engines=(engine(**more),)).engines
    assert (report.places, report.budgets) == ((), {})


def test_no_join_without_host_pids() -> None:
    """PIDs of another namespace are not joined."""
    facts = nvml(gpu(on_gpu(12)), processes=tree(), host_pids=False)
    assert Thinker()(nvml=facts, engines=(engine(),)).engines[0].places == ()


def test_join_to_a_mig_instance() -> None:
    """The place is the instance."""
    one = GpuInstance(1, "3g.40gb", Memory(40 * GIB, GIB, 39 * GIB, 0), (on_gpu(12),))
    facts = nvml(gpu(mig=True, processes=None, instances=(one,)), processes=tree())
    (report,) = Thinker()(nvml=facts, engines=(engine(),)).engines
    assert report.places == (Place("0", "GPU-0", "1", "3g.40gb"),)
    assert report.budgets == {report.places[0]: math.ceil(40 * GIB * 0.9)}


def test_budget() -> None:
    """ceil(CUDA's total × gpu_memory_utilization) on each of its GPUs, absent where the ratio is void."""
    facts = nvml(gpu(on_gpu(12)), processes=tree())
    assert Thinker()(nvml=facts, engines=(engine(),)).engines[0].budgets == {PLACE: math.ceil(79 * GIB * 0.9)}
    bytes_given = engine(ranks=(EngineRank("0", kv_used_ratio=0.5, kv_capacity_bytes=GIB),))
    assert Thinker()(nvml=facts, engines=(bytes_given,)).engines[0].budgets == {}


@pytest.mark.parametrize(
    ("argv", "budget"),
    [
        ("vllm serve m --gpu-memory-utilization 0.8", math.ceil(79 * GIB * 0.8)),
        ("vllm serve m --gpu-memory-utilization=0.5", math.ceil(79 * GIB * 0.5)),
        ("vllm serve m --gpu-memory-utilization=0.5 --kv-cache-memory-bytes 1G", None),
        ("vllm serve m", None),
        ("vllm serve m --gpu-memory-utilization", None),
        ("vllm serve m --gpu-memory-utilization lots", None),
        ("vllm serve m --gpu-memory-utilization 7", None),
    ],
)
def test_budget_of_a_loading_engine(argv: str, budget: int | None) -> None:
    """From its own command line; the default differs by version, so without the flag it is unknown."""
    server = process(10, "vllm", argv=tuple(argv.split()))
    facts = nvml(gpu(on_gpu(11)), processes=(server, process(11, "VLLM::EngineCor", 10)))
    loading = engine(answer=Answer.REFUSED, server=server, server_age_seconds=33.0)
    (report,) = Thinker()(nvml=facts, engines=(loading,)).engines
    assert report.budgets.get(PLACE) == budget
    assert report.loading_seconds == 33.0


@pytest.mark.parametrize(
    ("rooms", "available", "ratio"),
    [
        ((1.0, 1.0), 32, 0.25),
        ((0.1, 1.0), 32, 0.1),
        ((0.1, None), 32, None),
        ((None, None), 32, None),
        ((1.0, 1.0), None, None),
    ],
)
def test_host_memory(rooms: tuple[float | None, float | None], available: int | None, ratio: float | None) -> None:
    """The tighter of the host's RAM and the engine's own limits; a limit that cannot be read leaves it unknown."""
    server = process(10, "vllm", listening=frozenset({8000}), memory_room_ratio=rooms[0])
    worker = process(11, "VLLM::EngineCor", 10, memory_room_ratio=rooms[1])
    report = Thinker()(
        nvml=nvml(gpu(on_gpu(10), on_gpu(11)), processes=(server, worker)),
        engines=(engine(port=8000),),
        host=HostFacts(128, available),
    )
    assert report.engines[0].memory_available_ratio == ratio


def test_asleep_has_no_pool() -> None:
    """While asleep everything about the KV pool is absent."""
    (report,) = Thinker()(engines=(engine(ranks=(ASLEEP,)),)).engines
    (rank,) = report.ranks
    assert (rank.kv_used_ratio, rank.kv_capacity_tokens, rank.kv_starved_ratio) == (None, None, None)


def test_model_name_survives_a_fall() -> None:
    """A label that vanished with the engine would split its series and reset the alert that it is down."""
    think = Thinker()
    think(engines=(engine(),))
    (report,) = think(engines=(engine(answer=Answer.REFUSED, model_name=None),)).engines
    assert (report.state, report.model_name) == (EngineState.DOWN, "m")


def poll(ratio: float, waiting: int = 0, preemptions: int = 0, capacity: int | None = None) -> EngineRank:
    return EngineRank("0", ratio, waiting=waiting, waiting_for_capacity=capacity, preemptions_total=preemptions)


@pytest.mark.parametrize(
    ("polls", "starved"),
    [
        ([poll(0.99, 3), poll(0.99, 3)], 1.0),
        ([poll(0.99, 0), poll(0.99, 0)], 0.0),
        ([poll(0.94, 3), poll(0.94, 3)], 0.0),
        ([poll(0.99, 3, capacity=0), poll(0.99, 3, capacity=0)], 0.0),
        ([poll(0.99, 0, preemptions=5), poll(0.99, 0, preemptions=6)], 1.0),
        ([poll(0.99, 0, preemptions=5), poll(0.99, 0, preemptions=1)], 0.0),
        ([poll(0.99, 3), poll(0.99, 3), poll(0.1)], 0.5),
        ([poll(0.99, 3)], None),
    ],
)
def test_starved(polls: list[EngineRank], starved: float | None) -> None:
    """Full pool and requests that wait for it, or are preempted; waiting for a LoRA slot does not count."""
    think = Thinker()
    for rank in polls:
        report = think(5.0, engines=(engine(ranks=(rank,)),))
    assert report.engines[0].ranks[0].kv_starved_ratio == starved


def test_one_poll_counts_once() -> None:
    """Ticks between two polls see the same answer, which is one sample."""
    think = Thinker()
    facts = engine(ranks=(poll(0.99, 3),))
    for _ in range(5):
        report = think(1.0, engines=(facts,))
    assert report.engines[0].ranks[0].kv_starved_ratio is None


def test_history_of_gone_engines_goes() -> None:
    """Memory is bounded by what is there."""
    think = Thinker()
    think(engines=(engine(),))
    think(engines=())
    assert think.state.history.ranks == {}


def test_ranks_whose_labels_collide() -> None:
    """Two ranks that look alike once they are safe to show are one series: a page may have none twice."""
    ranks = (EngineRank("a<", running=1), EngineRank("a>", running=2), EngineRank("x" * 100, running=3))
    (report,) = Thinker()(engines=(engine(ranks=ranks),)).engines
    assert [(rank.rank, rank.running) for rank in report.ranks] == [("a", 2), ("x" * 64, 3)]


def test_a_server_that_has_served_is_not_loading() -> None:
    """Its process lives and its port is closed: a hung shutdown or a dead engine, which must page as down."""
    think = Thinker()
    server = process(10, "vllm", listening=frozenset({8000}), argv=("vllm", "serve", "m"))
    facts = nvml(gpu(on_gpu(11)), processes=(server, process(11, "VLLM::EngineCor", 10)))
    think(nvml=facts, engines=(engine(),))
    gone = engine(answer=Answer.REFUSED, server=server)
    (report,) = think(nvml=facts, engines=(gone,)).engines
    assert (report.state, report.expected_up) == (EngineState.DOWN, False)
    anew = process(10, "vllm", start_ticks=99, argv=("vllm", "serve", "m"))
    (report,) = think(nvml=facts, engines=(engine(answer=Answer.REFUSED, server=anew),)).engines
    assert report.state is EngineState.LOADING, "another process of the same PID"
