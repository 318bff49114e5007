"""How much room is left: levels, low-water marks, promised memory, unified memory, and the inventory."""

from __future__ import annotations

from gpu_oom_exporter.model import (
    Answer,
    EngineRank,
    GpuInstance,
    Headroom,
    HostFacts,
    LogFacts,
    Memory,
    MemoryKind,
    PciGpu,
    Place,
    XidCount,
)
from tests.analysis.facts import GIB, PLACE, PLACES, Thinker, engine, gpu, nvml, on_gpu, process

SERVER = (process(10, "vllm", listening=frozenset({8000})), process(11, "VLLM::EngineCor", 10))


def room(used: int = 10 * GIB) -> Headroom:
    return Thinker()(nvml=nvml(gpu(used=used))).headroom[PLACE]


def test_levels() -> None:
    """total = reserved + used + free, and headroom is free."""
    got = room()
    assert (got.total_bytes, got.reserved_bytes, got.used_bytes, got.free_bytes) == (80 * GIB, GIB, 10 * GIB, 69 * GIB)
    assert (got.headroom_bytes, got.headroom_ratio) == (69 * GIB, 69 / 80)


def test_low_water_mark_lasts_a_minute() -> None:
    """A dip between two scrapes is seen for 60 seconds."""
    think = Thinker()
    think(nvml=nvml(gpu(used=78 * GIB)))
    marks = [think(20.0, nvml=nvml(gpu())).headroom[PLACE].headroom_min_bytes for _ in range(4)]
    assert marks == [GIB, GIB, GIB, 69 * GIB]


def test_serving_headroom_only_on_serving_gpus() -> None:
    """Level alerts look at GPUs with a ready engine alone."""
    facts = nvml(gpu(on_gpu(11)), gpu(index=1), processes=SERVER)
    report = Thinker()(nvml=facts, engines=(engine(),))
    assert [report.headroom[place].serving_min_bytes for place in PLACES[:2]] == [69 * GIB, None]


def test_serving_minimum_begins_anew_with_each_life() -> None:
    """What was low before the engine became ready is no news of its serving."""
    think = Thinker()
    low = nvml(gpu(on_gpu(11), used=78 * GIB), processes=SERVER)
    assert think(nvml=low, engines=(engine(),)).headroom[PLACE].serving_min_bytes == GIB
    assert think(nvml=low, engines=(engine(answer=Answer.REFUSED),)).headroom[PLACE].serving_min_bytes is None
    well = nvml(gpu(on_gpu(11)), processes=SERVER)
    assert think(nvml=well, engines=(engine(),)).headroom[PLACE].serving_min_bytes == 69 * GIB
    think(nvml=low, engines=(engine(),))
    marks = [think(100.0, nvml=well, engines=(engine(),)).headroom[PLACE].serving_min_bytes for _ in range(4)]
    assert marks == [GIB, GIB, GIB, 69 * GIB], "five minutes"


def test_promised() -> None:
    """A sleeping engine will want its budget back: what it does not hold now is promised."""
    facts = nvml(gpu(on_gpu(11, 2 * GIB)), processes=SERVER)
    asleep = engine(ranks=(EngineRank("0", asleep=True, gpu_memory_utilization=0.5),))
    got = Thinker()(nvml=facts, engines=(asleep,)).headroom[PLACE]
    assert got.promised_bytes == 79 * GIB // 2 - 2 * GIB
    awake = Thinker()(nvml=facts, engines=(engine(),)).headroom[PLACE]
    assert awake.promised_bytes == 0


def test_promised_counts_against_serving() -> None:
    """Beside a ready engine, what is promised to a sleeping one is not there."""
    processes = (*SERVER, process(20, "vllm", listening=frozenset({8001})), process(21, "VLLM::EngineCor", 20))
    facts = nvml(gpu(on_gpu(11, 30 * GIB), on_gpu(21, 2 * GIB), used=32 * GIB), processes=processes)
    asleep = engine("other", port=8001, ranks=(EngineRank("0", asleep=True, gpu_memory_utilization=0.25),))
    got = Thinker()(nvml=facts, engines=(engine(), asleep)).headroom[PLACE]
    assert got.promised_bytes == 79 * GIB // 4 - 2 * GIB
    assert got.serving_min_bytes == 47 * GIB - (79 * GIB // 4 - 2 * GIB)


def test_unified_memory() -> None:
    """Headroom is MemAvailable; used is the sum over processes; there is no total of its own."""
    facts = nvml(
        gpu(on_gpu(7, 3 * GIB), on_gpu(8, GIB), memory=None, memory_kind=MemoryKind.UNIFIED),
        processes=(process(7), process(8)),
    )
    host = HostFacts(memory_total_bytes=128 * GIB, memory_available_bytes=32 * GIB)
    got = Thinker()(nvml=facts, host=host).headroom[PLACE]
    assert (got.total_bytes, got.free_bytes, got.used_bytes) == (None, None, 4 * GIB)
    assert (got.headroom_bytes, got.headroom_ratio, got.headroom_min_bytes) == (32 * GIB, 0.25, 32 * GIB)
    assert Thinker()(nvml=facts).headroom == {}, "without the host's figure there is none"


def test_mig_adds_up() -> None:
    """With MIG on, memory exists per instance only; the parent keeps info, up and Xid."""
    instances = (
        GpuInstance(1, "3g.40gb", Memory(40 * GIB, GIB, 39 * GIB, 0), ()),
        GpuInstance(2, "3g.40gb", None, None),
    )
    xid = XidCount("GPU-0", 31, 2)
    report = Thinker()(nvml=nvml(gpu(mig=True, processes=None, instances=instances), xids=(xid,)))
    assert list(report.headroom) == [Place("0", "GPU-0", "1", "3g.40gb")], "one closed to us costs only itself"
    assert report.gpu_up == {PLACE: True}
    assert [identity.place for identity in report.gpus] == [PLACE]
    assert report.xids == {(PLACE, 31): 2}


def test_xids_by_the_kernel() -> None:
    """Where the kernel's messages are read they alone count, also for a GPU that NVML has lost; else NVML's events."""
    thinker = Thinker()
    facts = nvml(gpu(), xids=(XidCount("GPU-0", 31, 2),))
    (identity,) = thinker(nvml=facts, logs=LogFacts()).gpus
    address = identity.pci_bus_id.lower()[4:-2]  # as the driver prints it: four digits of domain, no function
    told = LogFacts(kernel=True, xids={(address, 79): 3, ("0000:ff:00", 31): 1})
    report = thinker(nvml=facts, logs=told)
    assert report.xids == {(PLACE, 79): 3}
    assert thinker(nvml=nvml(gpu(up=False)), logs=told).xids == {(PLACE, 79): 3}
    assert thinker(nvml=facts, logs=LogFacts()).xids == {(PLACE, 31): 2}


def pci(index: int, **more: object) -> PciGpu:
    return PciGpu(f"00000000:{index:02X}:00.0", **more)  # type: ignore[arg-type]


def test_a_gpu_that_nvml_lists_no_more() -> None:
    """It is down under the name it had."""
    think = Thinker()
    host = HostFacts(gpus=(pci(0), pci(1)))
    assert think(nvml=nvml(gpu(), gpu(index=1)), host=host).gpu_up == {PLACES[0]: True, PLACES[1]: True}
    report = think(nvml=nvml(gpu()), host=host)
    assert report.gpu_up == {PLACES[0]: True, PLACES[1]: False}
    assert report.headroom.keys() == {PLACES[0]}


def test_a_gpu_that_nvml_never_listed() -> None:
    """After a restart it is down under its address, with the UUID the driver's /proc file tells."""
    host = HostFacts(gpus=(pci(0), pci(1, uuid="GPU-x", name="H100"), pci(2)))
    report = Thinker()(nvml=nvml(gpu()), host=host)
    assert report.gpu_up == {
        PLACES[0]: True,
        Place("00000000:01:00.0", "GPU-x"): False,
        Place("00000000:02:00.0", ""): False,
    }


def test_a_gpu_that_nvml_counts_without_a_handle() -> None:
    """It is one GPU, not two: the one on the bus that no other handle has."""
    broken = gpu(index=1, uuid="", pci_bus_id="", up=False, memory=None, processes=None)
    report = Thinker()(nvml=nvml(gpu(), broken), host=HostFacts(gpus=(pci(0), pci(1, uuid="GPU-1"))))
    assert report.gpu_up == {PLACES[0]: True, PLACES[1]: False}


def test_a_sleeping_gpu() -> None:
    """It is neither up nor down; nothing was asked of it."""
    report = Thinker()(nvml=nvml(gpu(up=None, memory=None, processes=None)), host=HostFacts(gpus=(pci(0),)))
    assert report.gpu_up == {}
    assert len(report.gpus) == 1


def test_no_driver_says_nothing_of_gpus() -> None:
    """Without NVML, GPUs on the bus are unknown, not down: that the source is down is told elsewhere."""
    assert Thinker()(host=HostFacts(gpus=(pci(0),))).gpu_up == {}


def test_gone_places_are_forgotten() -> None:
    """Memory is bounded by what is there."""
    think = Thinker()
    think(nvml=nvml(gpu(), gpu(index=1)))
    think(nvml=nvml(gpu()))
    assert set(think.state.history.headroom) == {PLACE}


def test_promised_is_absent_while_a_budget_is_unknown() -> None:
    """An engine that loads with an unknown budget will take something: no figure is better than a zero."""
    facts = nvml(gpu(on_gpu(11, 2 * GIB)), processes=SERVER)
    loading = engine(answer=Answer.REFUSED, server=process(10, "vllm", argv=("vllm", "serve", "m")))
    got = Thinker()(nvml=facts, engines=(loading,)).headroom[PLACE]
    assert (got.promised_bytes, got.serving_min_bytes) == (None, None)


def test_info_labels_survive_a_loss() -> None:
    """The kind of memory is a static fact: it does not become unknown because the GPU is lost."""
    think = Thinker()
    think(nvml=nvml(gpu()))
    report = think(nvml=nvml(gpu(up=False, memory=None, memory_kind=MemoryKind.UNKNOWN, processes=None)))
    assert report.gpus[0].memory_kind is MemoryKind.DEDICATED


def test_a_gpu_that_does_not_say_where_it_is() -> None:
    """NVML has it, only its address is missing: it is the one that seems to be missing on the bus, and it is up."""
    vague = gpu(index=1, pci_bus_id="")
    report = Thinker()(nvml=nvml(gpu(), vague), host=HostFacts(gpus=(pci(0), pci(1))))
    assert report.gpu_up == {PLACES[0]: True, PLACES[1]: True}
    assert [identity.pci_bus_id for identity in report.gpus] == ["00000000:00:00.0", "00000000:01:00.0"]
