"""Every metric we expose: name, help, labels, how many series it makes, and how it is read from a `Report`.

To add one: compute a field of `Report` in one `analysis/` module, add one `Metric` here, run
`gpu-oom-exporter generate`. Names are fixed by the design; units are in the names.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu_oom_exporter import __version__
from gpu_oom_exporter.model import (
    FIXABLE_GAPS,
    Cause,
    EngineReport,
    EngineState,
    Family,
    Gap,
    Headroom,
    OwnProcess,
    Place,
    RankReport,
    Report,
    Sample,
)

Rows = Iterable[Sample]
PLACE = ("gpu", "UUID", "GPU_I_ID", "GPU_I_PROFILE")
"""DCGM Exporter's spelling. On a whole GPU the last two are empty, which to Prometheus means absent."""

GPU = ("gpu", "UUID")

WORKLOAD = ("workload_namespace", "workload_pod", "workload_container")
"""Not `pod`: a ServiceMonitor's own target labels would win."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `series` says in words how many series there are; `group` is its heading in the docs."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    series: str
    read: Callable[[Report], Rows]
    group: str


def families(report: Report) -> tuple[Family, ...]:
    """The samples of *report*, family by family; a family without samples is left out."""
    found = []
    for metric in METRICS:
        samples = tuple(metric.read(report))
        if samples:
            found.append(Family(metric.name, metric.type, metric.help, metric.labels, samples))
    return tuple(found)


def _of(place: Place) -> tuple[str, ...]:
    return place.gpu, place.uuid, place.instance_id, place.profile


def _room(field: str) -> Callable[[Report], Rows]:
    get: Callable[[Headroom], Any] = lambda room: getattr(room, field)  # noqa: E731

    def read(report: Report) -> Iterator[Sample]:
        for place, room in report.headroom.items():
            value = get(room)
            if value is not None:
                yield _of(place), value

    return read


def _engine(value: Callable[[EngineReport], float | None]) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        for engine in report.engines:
            found = value(engine)
            if found is not None:
                yield (engine.name, engine.model_name or ""), found

    return read


def _rank(value: Callable[[RankReport], float | None]) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        for engine in report.engines:
            for rank in engine.ranks:
                found = value(rank)
                if found is not None:
                    yield (engine.name, rank.rank, engine.model_name or ""), found

    return read


def _host(field: str) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        value = getattr(report.host, field, None)
        if value is not None:
            yield (), value

    return read


def _own(value: Callable[[OwnProcess], float]) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        if report.host is not None and report.host.own is not None:
            yield (), value(report.host.own)

    return read


def _attribution_complete(report: Report) -> Rows:
    for place, owned in report.ownership.items():
        if owned.complete is not None:
            yield _of(place), float(owned.complete)


def _gaps(report: Report) -> Rows:
    for place, owned in report.ownership.items():
        for gap in Gap:
            if gap in owned.gaps:
                yield (*_of(place), gap.value), 1.0


def _fixable(report: Report) -> Rows:
    for place, owned in report.ownership.items():
        if owned.complete is not None:
            yield _of(place), float(len(owned.gaps & FIXABLE_GAPS))


def _held(report: Report) -> Rows:
    for place, owned in report.ownership.items():
        for holder, used in (owned.held or {}).items():
            yield (*_of(place), holder.value), used


def _orphaned(field: str) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        for place, owned in report.ownership.items():
            for cause, value in (getattr(owned, field) or {}).items():
                yield (*_of(place), cause.value), value

    return read


def _stuck(report: Report) -> Rows:
    for place, owned in report.ownership.items():
        if owned.orphaned is not None:
            yield _of(place), owned.orphaned[Cause.DEAD_PID] + owned.orphaned[Cause.STUCK]


def _owned(field: str) -> Callable[[Report], Rows]:
    def read(report: Report) -> Iterator[Sample]:
        for place, owned in report.ownership.items():
            value = getattr(owned, field)
            if value is not None:
                yield _of(place), value

    return read


def _failures(report: Report) -> Rows:
    for name, health in report.health.items():
        for reason, count in health.failures.items():
            yield (name, reason), count


def _last_success(report: Report) -> Rows:
    for name, health in report.health.items():
        if health.last_success_time is not None:
            yield (name,), health.last_success_time


def _engine_gpus(report: Report) -> Rows:
    for engine in report.engines:
        for place in engine.places:
            yield (engine.name, place.gpu, place.uuid, place.instance_id), 1.0


def _budgets(report: Report) -> Rows:
    for engine in report.engines:
        for place, budget in engine.budgets.items():
            yield (engine.name, place.uuid, place.instance_id), budget


ENGINE = ("engine", "model_name")
RANK = ("engine", "rank", "model_name")
PER_PLACE = "one per GPU or MIG instance"
PER_ENGINE = "one per engine"
PER_RANK = "one per engine and rank"
ONE = "one"

METRICS: tuple[Metric, ...] = (
    # ------------------------------------------------------------------------------------ room
    Metric(
        "gpu_oom_vram_total_bytes",
        "gauge",
        "Memory of the GPU or MIG instance: total = reserved + used + free. Absent on unified memory.",
        PLACE,
        PER_PLACE,
        _room("total_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_reserved_bytes",
        "gauge",
        "Memory the driver and firmware keep. Absent where NVML only has memory info v1, which counts it as used.",
        PLACE,
        PER_PLACE,
        _room("reserved_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_used_bytes",
        "gauge",
        "Memory in use. On unified memory: the sum over processes.",
        PLACE,
        PER_PLACE,
        _room("used_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_free_bytes",
        "gauge",
        "Memory nobody has. Absent on unified memory, where headroom is what counts.",
        PLACE,
        PER_PLACE,
        _room("free_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_headroom_bytes",
        "gauge",
        "Lower bound of what the next allocation outside an engine's own pool can get: free memory, or MemAvailable "
        "on unified memory.",
        PLACE,
        PER_PLACE,
        _room("headroom_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_headroom_ratio",
        "gauge",
        "Headroom as a share of all memory, 0 to 1.",
        PLACE,
        PER_PLACE,
        _room("headroom_ratio"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_headroom_min_bytes",
        "gauge",
        "Lowest headroom of the last 60 seconds, read every second: the dips between two scrapes.",
        PLACE,
        PER_PLACE,
        _room("headroom_min_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_vram_promised_bytes",
        "gauge",
        "Budget of sleeping or loading engines that they have not taken yet. Absent while one's budget is not known.",
        PLACE,
        PER_PLACE,
        _room("promised_bytes"),
        "Room on the GPU",
    ),
    Metric(
        "gpu_oom_serving_headroom_min_bytes",
        "gauge",
        "Lowest free minus promised memory of the last 5 minutes. Only on GPUs with a ready engine whose allocator "
        "grows while it serves.",
        PLACE,
        PER_PLACE,
        _room("serving_min_bytes"),
        "Room on the GPU",
    ),
    # ---------------------------------------------------------------------------------- holders
    Metric(
        "gpu_oom_vram_held_bytes",
        "gauge",
        "Used memory by who holds it: engine, process, graphics, mps, suspended, orphan, unattributed. Absent while "
        "the figure of any process is unknown.",
        (*PLACE, "holder"),
        "up to 7 per GPU or MIG instance",
        _held,
        "Holders",
    ),
    Metric(
        "gpu_oom_process_vram_bytes",
        "gauge",
        "Memory by command name, for commands above a floor. Never a command line; pid with --collect.process-pid.",
        (*PLACE, "comm", *WORKLOAD, "pid"),
        "one per GPU and command above the floor",
        lambda r: (
            ((*_of(place), comm, workload.namespace, workload.pod, workload.container, pid), used)
            for (place, comm, workload, pid), used in r.process_bytes.items()
        ),
        "Holders",
    ),
    Metric(
        "gpu_oom_vram_orphaned_bytes",
        "gauge",
        "Memory that no living thing will ever use again, by proven cause: dead_pid, defunct, engine_orphan, "
        "container_gone, stuck. Absent where nothing can be proven; its sum is held_bytes of holder orphan.",
        (*PLACE, "cause"),
        "5 per GPU or MIG instance",
        _orphaned("orphaned"),
        "Holders",
    ),
    Metric(
        "gpu_oom_orphaned_contexts",
        "gauge",
        "Processes behind orphaned memory, by cause.",
        (*PLACE, "cause"),
        "5 per GPU or MIG instance",
        _orphaned("orphaned_contexts"),
        "Holders",
    ),
    Metric(
        "gpu_oom_vram_stuck_bytes",
        "gauge",
        "Orphaned memory that no signal can free (dead_pid and stuck): it takes a reset of the GPU, or a reboot.",
        PLACE,
        PER_PLACE,
        _stuck,
        "Holders",
    ),
    Metric(
        "gpu_oom_vram_idle_held_bytes",
        "gauge",
        "Memory of live processes, engines not counted, that have not computed for 6 hours. Absent where the driver "
        "does not tell the activity of processes.",
        PLACE,
        PER_PLACE,
        _owned("idle_bytes"),
        "Holders",
    ),
    Metric(
        "gpu_oom_vram_newcomer_bytes",
        "gauge",
        "Memory of processes that came to a serving GPU after its engine was ready, without allowed co-tenants. Absent "
        "on GPUs that do not serve, under MPS, and beside a sleeping engine.",
        PLACE,
        PER_PLACE,
        _owned("newcomer_bytes"),
        "Holders",
    ),
    Metric(
        "gpu_oom_vram_overcommit_bytes",
        "gauge",
        "Budgets of awake engines plus everybody else's memory, over the total; 0 when they fit. Absent unless every "
        "term is known.",
        PLACE,
        PER_PLACE,
        _owned("overcommit_bytes"),
        "Holders",
    ),
    Metric(
        "gpu_oom_attribution_complete",
        "gauge",
        "1 when every PID that NVML named was found in the host PID namespace and had a figure; 0 after the same "
        "gap in 3 readings in a row.",
        PLACE,
        PER_PLACE,
        _attribution_complete,
        "Holders",
    ),
    Metric(
        "gpu_oom_attribution_gap",
        "gauge",
        "1 for each reason why memory cannot be given to its holders: no_host_pid, no_permission, wddm, mps, vgpu, "
        "not_supported.",
        (*PLACE, "reason"),
        "one per GPU and present reason",
        _gaps,
        "Holders",
    ),
    Metric(
        "gpu_oom_attribution_fixable_gaps",
        "gauge",
        "How many of the gaps a setting of this deployment closes (no_host_pid, no_permission).",
        PLACE,
        PER_PLACE,
        _fixable,
        "Holders",
    ),
    # -------------------------------------------------------------------------------------- GPUs
    Metric(
        "gpu_oom_gpu_info",
        "gauge",
        "Always 1. Static facts of the GPU; memory_kind is dedicated, dedicated_v1 (reserved counted as used), "
        "unified, or unknown.",
        (*GPU, "product_name", "pci_bus_id", "device", "driver_version", "memory_kind"),
        "one per GPU",
        lambda r: (
            (
                (
                    g.place.gpu,
                    g.place.uuid,
                    g.product_name,
                    g.pci_bus_id,
                    g.device,
                    g.driver_version,
                    g.memory_kind.value,
                ),
                1.0,
            )
            for g in r.gpus
        ),
        "GPUs",
    ),
    Metric(
        "gpu_oom_gpu_up",
        "gauge",
        "1 when NVML answers for the GPU, 0 when a GPU on the bus has no working NVML handle. Absent while it "
        "sleeps and while NVML itself cannot be read.",
        GPU,
        "one per GPU",
        lambda r: (((p.gpu, p.uuid), float(up)) for p, up in r.gpu_up.items()),
        "GPUs",
    ),
    Metric(
        "gpu_oom_gpu_action_required",
        "gauge",
        "1 with the recovery action that the driver asks for, 0 with action none. Absent where it does not tell.",
        (*GPU, "action"),
        "one per GPU",
        lambda r: (((p.gpu, p.uuid, a), float(a != "none")) for p, a in r.recovery_actions.items()),
        "GPUs",
    ),
    Metric(
        "gpu_oom_xid_errors_total",
        "counter",
        'Xid errors by number since the daemon started: by the kernel where `gpu_oom_source_up{source="kernel"}` is 1,'
        " else by NVML. A series appears with its first error.",
        (*GPU, "xid"),
        "one per GPU and Xid seen",
        lambda r: (((p.gpu, p.uuid, str(xid)), n) for (p, xid), n in r.xids.items()),
        "GPUs",
    ),
    # --------------------------------------------------------------------------------- incidents
    Metric(
        "gpu_oom_incidents_total",
        "counter",
        "Incidents found in logs since the archive began, by category; counted once over restarts. Absent while the "
        "archive cannot be read.",
        ("category",),
        "one per category",
        lambda r: (((category,), count) for category, count in r.incidents.items()),
        "Incidents",
    ),
    Metric(
        "gpu_oom_incident_last_timestamp_seconds",
        "gauge",
        "When the newest incident of the category was found, unix time. Absent until there was one.",
        ("category",),
        "one per category seen",
        lambda r: (((category,), last) for category, last in (r.logs.last_times if r.logs else {}).items()),
        "Incidents",
    ),
    Metric(
        "gpu_oom_incidents_recent",
        "gauge",
        "Incidents of the last 15 minutes (30 for failed starts) by alert group, with engine, GPU and workload where "
        "they are known. Absent without one.",
        ("group", "engine", *GPU, *WORKLOAD),
        "at most 32",
        lambda r: (
            ((w.group, w.engine, w.gpu, w.uuid, w.workload.namespace, w.workload.pod, w.workload.container), count)
            for w, count in r.incidents_recent.items()
        ),
        "Incidents",
    ),
    Metric(
        "gpu_oom_engine_deaths_recent",
        "gauge",
        "Critical incidents of the engine within 30 minutes; a clean end is none. Absent without one.",
        ("engine",),
        "one per engine that died",
        lambda r: (((engine,), count) for engine, count in r.engine_deaths.items()),
        "Incidents",
    ),
    Metric(
        "gpu_oom_log_files",
        "gauge",
        "Log files that are followed.",
        (),
        ONE,
        lambda r: (((), r.logs.files),) if r.logs else (),
        "Incidents",
    ),
    Metric(
        "gpu_oom_log_files_unreadable",
        "gauge",
        "Log files that should be followed and cannot be read; the daemon's log names them.",
        (),
        ONE,
        lambda r: (((), r.logs.unreadable),) if r.logs else (),
        "Incidents",
    ),
    Metric(
        "gpu_oom_log_lines_dropped_total",
        "counter",
        "Lines that were skipped because a log grew faster than it can be read, since the daemon started.",
        (),
        ONE,
        lambda r: (((), r.logs.dropped_lines),) if r.logs else (),
        "Incidents",
    ),
    Metric(
        "gpu_oom_log_gaps_total",
        "counter",
        "Places where part of a log could not be read, by reason, since the daemon started: truncated in place, "
        "rotated away while the daemon was down, kernel ring overwritten.",
        ("reason",),
        "one per reason seen",
        lambda r: (((reason,), count) for reason, count in (r.logs.gaps if r.logs else {}).items()),
        "Incidents",
    ),
    # ----------------------------------------------------------------------------------- engines
    Metric(
        "gpu_oom_engine_info",
        "gauge",
        "Always 1. Static facts of the engine; version is its last known one, derived names the values that its page "
        "does not tell and that were worked out from others.",
        (*ENGINE, "kind", "version", "url", "derived"),
        PER_ENGINE,
        lambda r: (((e.name, e.model_name or "", e.kind, e.version or "", e.url, e.derived), 1.0) for e in r.engines),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_up",
        "gauge",
        "1 when the engine's API server answered the last poll.",
        ENGINE,
        PER_ENGINE,
        _engine(lambda e: float(e.up)),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_state",
        "gauge",
        "1 for the state the engine is in, 0 for the others.",
        (*ENGINE, "state"),
        "7 per engine",
        lambda r: (
            ((e.name, e.model_name or "", state.value), float(state is e.state))
            for e in r.engines
            for state in EngineState
        ),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_expected_up",
        "gauge",
        "For declared engines: 1 while up or loading, 0 while down or unreachable.",
        ENGINE,
        PER_ENGINE,
        _engine(lambda e: None if e.expected_up is None else float(e.expected_up)),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_loading_seconds",
        "gauge",
        "How long the engine's process has been loading. Absent while it is not.",
        ENGINE,
        "one per loading engine",
        _engine(lambda e: e.loading_seconds),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_stats_enabled",
        "gauge",
        "0 when the engine answers without its own metrics (--disable-log-stats). Absent while it does not answer.",
        ENGINE,
        PER_ENGINE,
        _engine(lambda e: None if e.stats_enabled is None else float(e.stats_enabled)),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_gpu_info",
        "gauge",
        "Always 1. A GPU on which the engine's processes hold memory, where this host can see them.",
        ("engine", "gpu", "UUID", "GPU_I_ID"),
        "one per engine and GPU",
        _engine_gpus,
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_memory_budget_bytes",
        "gauge",
        "What the engine may take of a GPU: total × gpu_memory_utilization. Absent when its size was set otherwise.",
        ("engine", "UUID", "GPU_I_ID"),
        "one per engine and GPU",
        _budgets,
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_memory_available_ratio",
        "gauge",
        "Host memory left to the engine, 0 to 1: of the host's RAM or of its cgroup's limit, whichever is tighter."
        " Absent when a limit cannot be read.",
        ENGINE,
        PER_ENGINE,
        _engine(lambda e: e.memory_available_ratio),
        "Engines",
    ),
    Metric(
        "gpu_oom_engine_max_model_len_tokens",
        "gauge",
        "Longest context the engine accepts.",
        ENGINE,
        PER_ENGINE,
        _engine(lambda e: e.max_model_len),
        "Engines",
    ),
    # ----------------------------------------------------------------------------------- KV cache
    Metric(
        "gpu_oom_kv_cache_used_ratio",
        "gauge",
        "Share of the KV pool held by live requests, 0 to 1; 0.95 to 1 is normal under load. Absent while asleep.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.kv_used_ratio),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_kv_cache_capacity_tokens",
        "gauge",
        "Tokens the KV pool holds. Absent where the engine's page cannot tell.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.kv_capacity_tokens),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_kv_cache_used_tokens",
        "gauge",
        "Tokens held by live requests. Absent where ratio × capacity would be wrong (hybrid models).",
        RANK,
        PER_RANK,
        _rank(lambda k: k.kv_used_tokens),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_kv_cache_capacity_bytes",
        "gauge",
        "Bytes of the KV pool, where the engine was given them.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.kv_capacity_bytes),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_kv_cache_starved_ratio",
        "gauge",
        "Share of the last 10 minutes with the KV pool at 0.95 or more while requests waited for it or were preempted.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.kv_starved_ratio),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_engine_requests_running",
        "gauge",
        "Requests in the running batch.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.running),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_engine_requests_waiting",
        "gauge",
        "Requests waiting to be scheduled.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.waiting),
        "KV cache and requests",
    ),
    Metric(
        "gpu_oom_engine_preemptions_total",
        "counter",
        "Requests pushed out of the KV pool to be computed again; the engine's own counter.",
        RANK,
        PER_RANK,
        _rank(lambda k: k.preemptions_total),
        "KV cache and requests",
    ),
    # --------------------------------------------------------------------------------------- host
    Metric(
        "gpu_oom_host_memory_total_bytes",
        "gauge",
        "RAM of the host (MemTotal).",
        (),
        ONE,
        _host("memory_total_bytes"),
        "Host",
    ),
    Metric(
        "gpu_oom_host_memory_available_bytes",
        "gauge",
        "RAM that can be had without swapping (MemAvailable).",
        (),
        ONE,
        _host("memory_available_bytes"),
        "Host",
    ),
    Metric(
        "gpu_oom_host_swap_free_bytes",
        "gauge",
        "Swap that is free (SwapFree).",
        (),
        ONE,
        _host("swap_free_bytes"),
        "Host",
    ),
    Metric(
        "gpu_oom_shm_size_bytes",
        "gauge",
        "Size of the host's /dev/shm; a container has its own unless it shares the host's. Absent where PID 1's root "
        "cannot be looked into.",
        (),
        ONE,
        _host("shm_size_bytes"),
        "Host",
    ),
    Metric(
        "gpu_oom_shm_free_bytes",
        "gauge",
        "Free bytes of the host's /dev/shm. Absent where its size is.",
        (),
        ONE,
        _host("shm_free_bytes"),
        "Host",
    ),
    # --------------------------------------------------------------------------------------- self
    Metric(
        "gpu_oom_build_info",
        "gauge",
        "Always 1. Version of the exporter and of Python.",
        ("version", "python_version"),
        ONE,
        lambda r: [((__version__, platform.python_version()), 1.0)],
        "The exporter itself",
    ),
    Metric(
        "gpu_oom_source_up",
        "gauge",
        "1 when the source's newest facts are in use, 0 when it failed or they are too old. `kernel`: 1 when its"
        " messages are read, absent where that is not allowed.",
        ("source",),
        "one per enabled source",
        lambda r: (
            *(((name,), float(h.ok)) for name, h in r.health.items()),
            *((("kernel",), 1.0) for logs in (r.logs,) if logs is not None and logs.kernel),
        ),
        "The exporter itself",
    ),
    Metric(
        "gpu_oom_source_last_success_timestamp_seconds",
        "gauge",
        "When the source was last read, unix time. Absent before the first success.",
        ("source",),
        "one per enabled source",
        _last_success,
        "The exporter itself",
    ),
    Metric(
        "gpu_oom_source_duration_seconds",
        "gauge",
        "How long the source's last read took.",
        ("source",),
        "one per enabled source",
        lambda r: (((name,), h.seconds) for name, h in r.health.items()),
        "The exporter itself",
    ),
    Metric(
        "gpu_oom_source_failures_total",
        "counter",
        "Failed reads by reason; insane_* counts values that could not be true and were left out.",
        ("source", "reason"),
        "one per source and reason seen",
        _failures,
        "The exporter itself",
    ),
    Metric(
        "gpu_oom_tick_lateness_seconds",
        "gauge",
        "How late the last tick began.",
        (),
        ONE,
        lambda r: [((), r.tick_lateness_seconds)],
        "The exporter itself",
    ),
    Metric(
        "process_cpu_seconds_total",
        "counter",
        "User and system CPU time of the daemon, without its NVML reader.",
        (),
        ONE,
        _own(lambda o: o.cpu_seconds),
        "The exporter itself",
    ),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory of the daemon, without its NVML reader.",
        (),
        ONE,
        _own(lambda o: o.resident_bytes),
        "The exporter itself",
    ),
    Metric(
        "process_virtual_memory_bytes",
        "gauge",
        "Virtual memory of the daemon.",
        (),
        ONE,
        _own(lambda o: o.virtual_bytes),
        "The exporter itself",
    ),
    Metric(
        "process_start_time_seconds",
        "gauge",
        "When the daemon started, unix time.",
        (),
        ONE,
        _own(lambda o: o.start_time),
        "The exporter itself",
    ),
    Metric(
        "process_open_fds",
        "gauge",
        "Open file descriptors of the daemon.",
        (),
        ONE,
        _own(lambda o: o.open_fds),
        "The exporter itself",
    ),
    Metric(
        "process_max_fds",
        "gauge",
        "Most file descriptors the daemon may open.",
        (),
        ONE,
        _own(lambda o: o.max_fds),
        "The exporter itself",
    ),
)

DROPPED = Metric(
    "gpu_oom_series_dropped_total",
    "counter",
    "Series left off the page because it held more than limits.series.",
    (),
    ONE,
    lambda r: (),
    "The exporter itself",
)
"""Counted by the page writer, which alone knows what it left off; it is on every page."""

SERIES_PER_GPU = 60
SERIES_PER_HOST = 150
"""The budget of `design.md` §4, held by a test."""
