"""What went wrong lately, and whose it is: windows, owners, bounds."""

from __future__ import annotations

from gpu_oom_exporter.analysis import recent
from gpu_oom_exporter.catalog.categories import CATEGORIES, Group
from gpu_oom_exporter.model import Container, ContainerFacts, Incident, LogFacts, LogOrigin, Recorded, Workload
from tests.analysis.facts import Thinker, engine, gpu, nvml, on_gpu, process

NOW = 1.8e9 + 1001.0
ID = "ab" * 32


def happened(
    category: str = "cuda_oom_runtime", origin: LogOrigin | None = None, ago: float = 10.0, **fields: object
) -> Recorded:
    incident = Incident(category, CATEGORIES[category].severity.value, fields, 1, 0)  # type: ignore[arg-type]
    return Recorded(incident, origin or LogOrigin("file:/x"), "1:2:0", NOW - ago)


def logs(*recorded: Recorded) -> LogFacts:
    return LogFacts(recent=recorded)


def test_totals_begin_at_zero() -> None:
    """Every category is there at 0 once the archive was read; without logs nothing is."""
    report = Thinker()(logs=LogFacts({"gpu_lost": 2}))
    assert set(CATEGORIES) == set(report.incidents)
    assert {0, 2} == set(report.incidents.values())
    assert Thinker()().incidents == {}


def test_windows() -> None:
    """15 minutes; 30 for a start that failed, which is tried again."""
    found = Thinker()(
        logs=logs(
            happened(ago=899.0),
            happened(ago=901.0),
            happened("kv_cache_no_blocks", ago=1799.0),
            happened("kv_cache_no_blocks", ago=1801.0),
        )
    ).incidents_recent
    assert {whose.group: count for whose, count in found.items()} == {"cuda_oom": 1, "startup": 1}


def test_owner_by_container() -> None:
    """A container's incidents are its engine's, with the only GPU that the engine has."""
    server = process(5, "vllm", cgroup=f"0::/system.slice/docker-{ID}.scope", listening=frozenset({8000}))
    origin = LogOrigin(f"docker:{ID}", "docker", ID)
    report = Thinker()(
        nvml=nvml(gpu(on_gpu(5)), processes=(server,)),
        engines=(engine("chat", port=8000, server=server),),
        containers=ContainerFacts({ID: Container(ID, "web")}),
        logs=logs(happened(origin=origin)),
    )
    ((whose, count),) = report.incidents_recent.items()
    assert ("chat", Workload("", "", "web"), 1) == (whose.engine, whose.workload, count)
    assert whose.uuid == "GPU-0"
    assert report.engine_deaths == {"chat": 1}


def test_owner_by_name_and_pid() -> None:
    """A configured file names its engine; the kernel's victim is known by its PID, a GPU by its PCI address."""
    server = process(5, "vllm", listening=frozenset({8000}))
    report = Thinker()(
        nvml=nvml(gpu(on_gpu(5)), processes=(server,)),
        engines=(engine("chat", port=8000, server=server),),
        logs=logs(
            happened(origin=LogOrigin("file:/x", engine="other")),
            happened("host_oom_kill_global", LogOrigin("kernel", "kernel"), pid=5),
            happened("host_oom_kill_global", LogOrigin("file:/y"), pid=5),
        ),
    )
    engines = {(whose.group, whose.engine) for whose in report.incidents_recent}
    assert {("cuda_oom", "other"), ("host_oom", "chat"), ("host_oom", "")} == engines


def test_owner_by_cgroup() -> None:
    """The container whose limit was reached is the one whose cgroup the kernel names."""
    killed = happened("host_oom_kill_cgroup", LogOrigin("kernel", "kernel"), cgroup=f"/system.slice/docker-{ID}.scope")
    known = ContainerFacts({ID: Container(ID, "vllm", "prod", "vllm-0")})
    ((whose, _),) = Thinker()(containers=known, logs=logs(killed)).incidents_recent.items()
    assert Workload("prod", "vllm-0", "vllm") == whose.workload


def test_bounded() -> None:
    """At most 32 series; what does not fit is summed under its group."""
    many = [happened(origin=LogOrigin(f"pod:{n}", "pod", "", "prod", f"p{n}", "vllm")) for n in range(100)]
    found = Thinker()(logs=logs(*many)).incidents_recent
    assert len(found) <= recent.MOST_SERIES
    assert sum(found.values()) == 100
    assert len(Group) == len({category.group for category in CATEGORIES.values()})


def test_deaths() -> None:
    """Critical incidents of the last half hour; a warning kills nobody."""
    mine = LogOrigin("file:/x", engine="chat")
    found = Thinker()(
        logs=logs(
            happened(origin=mine, ago=1799.0), happened("engine_core_died", mine), happened(origin=mine, ago=1801.0),
            happened("kv_cache_preemption", mine), happened(),
        )
    ).engine_deaths  # fmt: skip
    assert found == {"chat": 2}


def test_one_death_told_twice() -> None:
    """What an engine's log says of its end is explained by the kernel's kill in its container, within a minute only."""
    kernel = LogOrigin("kernel", "kernel")
    cgroup = f"/system.slice/docker-{ID}.scope"
    log = LogOrigin(f"docker:{ID}", "docker", ID)
    other = LogOrigin("pod:x", "pod", "", "prod", "other", "vllm")
    known = ContainerFacts({ID: Container(ID, "vllm", "prod", "vllm-0")})

    def groups(*recorded: Recorded) -> dict[str, int]:
        found: dict[str, int] = {}
        for whose, count in Thinker()(containers=known, logs=logs(*recorded)).incidents_recent.items():
            found[whose.group] = found.get(whose.group, 0) + count
        return found

    kill = happened("host_oom_kill_cgroup", kernel, ago=100.0, cgroup=cgroup)
    dead, sigkilled = happened("engine_core_died", log, ago=90.0), happened("worker_sigkilled", log, ago=110.0)
    assert groups(kill, dead, sigkilled) == {"host_oom": 1}
    assert groups(dead, sigkilled) == {"host_oom": 1, "engine_died": 1}, "SIGKILL alone is told for what it is"
    assert groups(kill, happened("engine_core_died", log, ago=30.0)) == {"host_oom": 1, "engine_died": 1}
    assert groups(kill, happened("engine_core_died", other, ago=100.0)) == {"host_oom": 1, "engine_died": 1}
    assert groups(kill, happened("cuda_oom_runtime", log, ago=100.0)) == {"host_oom": 1, "cuda_oom": 1}
    forged = happened("host_oom_kill_cgroup", log, ago=100.0, cgroup=cgroup)
    assert groups(forged, dead)["engine_died"] == 1
