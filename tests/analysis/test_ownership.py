"""Who holds the memory: holders, the sum, attribution and its gaps."""

from __future__ import annotations

import pytest

from gpu_oom_exporter.model import NO_WORKLOAD, Answer, Gap, GpuInstance, Holder, Memory, MemoryKind, Place, Report
from tests.analysis.facts import GIB, MIB, PLACE, Thinker, engine, gpu, nvml, on_gpu, process


def held(report: Report) -> dict[Holder, int]:
    found = report.ownership[PLACE].held
    assert found is not None
    return {holder: used for holder, used in found.items() if used}


@pytest.mark.parametrize(
    ("comm", "state", "kind", "holder"),
    [
        ("python3", "S", "compute", Holder.PROCESS),
        ("VLLM::EngineCor", "S", "compute", Holder.ENGINE),
        ("VLLM::Worker_TP", "R", "compute", Holder.ENGINE),
        ("VLLM::EngineCor", "T", "compute", Holder.SUSPENDED),
        ("python3", "t", "compute", Holder.SUSPENDED),
        ("Xorg", "S", "graphics", Holder.GRAPHICS),
        ("nvidia-cuda-mps", "S", "compute", Holder.MPS),
        ("python3", "S", "mps", Holder.MPS),
    ],
)
def test_holders(comm: str, state: str, kind: str, holder: Holder) -> None:
    """Each kind of process is the holder of its bytes."""
    facts = nvml(gpu(on_gpu(7, 10 * GIB, kind)), processes=(process(7, comm, state=state),))
    assert held(Thinker()(nvml=facts)) == {holder: 10 * GIB}


def test_the_sum_is_what_is_used() -> None:
    """Holders and the unattributed rest add up to used."""
    facts = nvml(gpu(on_gpu(7, 4 * GIB), on_gpu(8, GIB, "graphics")), processes=(process(7), process(8, "Xorg")))
    found = held(Thinker()(nvml=facts))
    assert found == {Holder.PROCESS: 4 * GIB, Holder.GRAPHICS: GIB, Holder.UNATTRIBUTED: 5 * GIB}
    assert sum(found.values()) == 10 * GIB


def test_more_than_used() -> None:
    """Shared memory may be counted at several processes: the rest is nothing, never negative."""
    facts = nvml(gpu(on_gpu(7, 12 * GIB)), processes=(process(7),))
    report = Thinker()(nvml=facts)
    assert held(report) == {Holder.PROCESS: 12 * GIB}
    found = report.ownership[PLACE].held
    assert found is not None
    assert found[Holder.UNATTRIBUTED] == 0, "a fact: nothing is left over"


def test_a_pid_nobody_has() -> None:
    """Without a verdict on it, the memory of a PID that is not there is unattributed: ignorance, no accusation."""
    assert held(Thinker()(nvml=nvml(gpu(on_gpu(7, 10 * GIB))))) == {Holder.UNATTRIBUTED: 10 * GIB}


def test_unknown_figures() -> None:
    """A figure that is N/A leaves no holder series at all: the sum would be a lie."""
    facts = nvml(gpu(on_gpu(7, None), on_gpu(8, GIB), gaps=frozenset({Gap.WDDM})), processes=(process(7), process(8)))
    report = Thinker()(nvml=facts)
    assert report.ownership[PLACE].held is None


def test_v1_counts_reserved_as_used() -> None:
    """With v1 the rest would hold what the driver reserves: no unattributed series."""
    facts = nvml(gpu(on_gpu(7, GIB), memory_kind=MemoryKind.DEDICATED_V1), processes=(process(7),))
    found = Thinker()(nvml=facts).ownership[PLACE].held
    assert found is not None
    assert Holder.UNATTRIBUTED not in found
    assert found[Holder.PROCESS] == GIB


def test_complete_turns_after_three_readings() -> None:
    """One PID that ended between two calls is normal; three readings in a row are a gap."""
    think = Thinker()
    claims = []
    for missing in (False, True, True, False, True, True, True, True, False):
        known = () if missing else (process(7),)
        report = think(nvml=nvml(gpu(on_gpu(7)), processes=known))
        claims.append(report.ownership[PLACE].complete)
    assert claims == [True, True, True, True, True, True, False, False, True]


def test_one_reading_counts_once() -> None:
    """Two ticks over the same reading are not two readings."""
    think = Thinker()
    facts = nvml(gpu(on_gpu(7)))
    claims = [think(nvml=facts).ownership[PLACE].complete for _ in range(10)]
    assert claims == [True] * 10


@pytest.mark.parametrize(
    ("facts", "gap"),
    [
        (nvml(gpu(on_gpu(7)), host_pids=False), Gap.NO_HOST_PID),
        (nvml(gpu(processes=None, gaps=frozenset({Gap.NO_PERMISSION}))), Gap.NO_PERMISSION),
        (nvml(gpu(processes=None)), Gap.NOT_SUPPORTED),
        (nvml(gpu(on_gpu(7, None), gaps=frozenset({Gap.WDDM})), processes=(process(7),)), Gap.WDDM),
        (nvml(gpu(gaps=frozenset({Gap.VGPU}))), Gap.VGPU),
        (nvml(gpu(on_gpu(7)), processes=(process(7, "nvidia-cuda-mps"),)), Gap.MPS),
    ],
)
def test_gaps(facts: object, gap: Gap) -> None:
    """Each gap is named, once confirmed, and attribution is not complete."""
    think = Thinker()
    copies = [nvml(*facts.gpus, processes=tuple(facts.processes.values()), host_pids=facts.host_pids) for _ in range(3)]  # type: ignore[attr-defined]
    reports = [think(nvml=copy) for copy in copies]
    assert [r.ownership[PLACE].gaps for r in reports] == [frozenset(), frozenset(), {gap}]
    assert reports[-1].ownership[PLACE].complete is False


def test_without_host_pids_nobody_is_accused() -> None:
    """Outside the host's PID namespace compute memory is some process's."""
    assert held(Thinker()(nvml=nvml(gpu(on_gpu(7, 10 * GIB)), host_pids=False))) == {Holder.PROCESS: 10 * GIB}


def test_mig_counts_per_instance() -> None:
    """Holders are per GPU instance, and the parent has none."""
    one = GpuInstance(1, "3g.40gb", Memory(40 * GIB, 5 * GIB, 35 * GIB, 0), (on_gpu(7, 4 * GIB),))
    two = GpuInstance(2, "2g.20gb", Memory(20 * GIB, GIB, 19 * GIB, 0), ())
    facts = nvml(gpu(mig=True, processes=None, instances=(one, two)), processes=(process(7),))
    report = Thinker()(nvml=facts)
    assert set(report.ownership) == {Place("0", "GPU-0", "1", "3g.40gb"), Place("0", "GPU-0", "2", "2g.20gb")}
    assert set(report.headroom) == set(report.ownership)


def test_declared_engines_are_holders_whatever_their_name() -> None:
    """Old vLLM is a plain python: it is an engine because it serves the declared port."""
    server = process(7, "python", listening=frozenset({8000}))
    facts = nvml(gpu(on_gpu(7, 10 * GIB)), processes=(server,))
    report = Thinker()(nvml=facts, engines=(engine(),))
    assert held(report) == {Holder.ENGINE: 10 * GIB}
    assert report.ownership[PLACE].holdings[0].engine == "chat"


def test_commands_have_a_floor_with_hysteresis() -> None:
    """A command enters at 256 MiB and leaves below 192 MiB; bytes are summed over processes of one name."""
    think = Thinker()
    shown = []
    for used in (255, 256, 200, 192, 191, 255, 300):
        facts = nvml(gpu(on_gpu(7, used * MIB)), processes=(process(7, "jupyter"),))
        shown.append(think(nvml=facts).process_bytes.get((PLACE, "jupyter", NO_WORKLOAD, ""), 0) // MIB)
    assert shown == [0, 256, 200, 192, 0, 0, 300]
    facts = nvml(gpu(on_gpu(7, 200 * MIB), on_gpu(8, 100 * MIB)), processes=(process(7, "a"), process(8, "a")))
    assert think(nvml=facts).process_bytes == {(PLACE, "a", NO_WORKLOAD, ""): 300 * MIB}


def test_hostile_names() -> None:
    """A command name cannot bring control characters, markup or length into a label."""
    facts = nvml(gpu(on_gpu(7)), processes=(process(7, "a\x1b[31m<b>|\n" + "x" * 100),))
    ((_, comm, _, _),) = Thinker()(nvml=facts).process_bytes
    assert comm == ("a[31mb" + "x" * 100)[:64]


def test_a_lost_gpu_has_no_owner() -> None:
    """What was not read is not told."""
    report = Thinker()(nvml=nvml(gpu(up=False, memory=None, processes=None)))
    assert (report.ownership, report.headroom) == ({}, {})


def test_no_reading_no_holders() -> None:
    """While NVML cannot be read nothing is said about holders, engines stay."""
    report = Thinker()(engines=(engine(answer=Answer.REFUSED),))
    assert report.ownership == {}
    assert len(report.engines) == 1


def test_pids_when_wanted() -> None:
    """With show_pid each process is a series of its own, and the floor is each one's."""
    facts = nvml(
        gpu(on_gpu(7, GIB), on_gpu(8, 2 * GIB), on_gpu(9, MIB)), processes=tuple(process(p, "a") for p in (7, 8, 9))
    )
    got = Thinker(processes={"show_pid": True})(nvml=facts).process_bytes
    assert got == {(PLACE, "a", NO_WORKLOAD, "7"): GIB, (PLACE, "a", NO_WORKLOAD, "8"): 2 * GIB}
