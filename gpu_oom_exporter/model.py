"""Everything that crosses a layer: facts (Snapshot), conclusions (Report), and their health. Read this first.

Sources turn the world into a `Snapshot`, analysis turns a `Snapshot` into a `Report`, publishers tell the
`Report`. All of it is frozen. Unknown is ``None`` and is never exposed; 0 is a fact.
Bytes are bytes, ratios are 0..1, `time` is unix seconds and `mono` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class Reason(StrEnum):
    """Why a source has no facts; a closed set, safe as a label value."""

    TIMEOUT = "timeout"  # the read took longer than the source may take
    STUCK = "stuck"  # the driver does not answer and its reader cannot be replaced
    NO_LIBRARY = "no_library"  # libnvidia-ml.so.1 is missing or is not a library
    NO_DRIVER = "no_driver"  # the library is there, the kernel driver is not
    MISMATCH = "mismatch"  # library and kernel driver have different versions
    NO_PERMISSION = "no_permission"
    DRIVER_LOST = "driver_lost"  # NVML answered before and fails now
    RELEASED = "released"  # somebody asked us to let go of the driver
    SUSPENDED = "suspended"  # every NVIDIA function sleeps and we do not wake it
    READER_FAILED = "reader_failed"  # the reader process ended or spoke nonsense
    STALE = "stale"  # the newest facts are too old to be used
    INTERNAL = "internal"  # a bug of ours; the log has the traceback


class Gap(StrEnum):
    """Why memory of a GPU cannot be given to its holders (`design.md` §4)."""

    NO_HOST_PID = "no_host_pid"
    NO_PERMISSION = "no_permission"
    WDDM = "wddm"
    MPS = "mps"
    VGPU = "vgpu"
    NOT_SUPPORTED = "not_supported"


FIXABLE_GAPS = frozenset({Gap.NO_HOST_PID, Gap.NO_PERMISSION})
"""Gaps that a setting of this deployment closes; the others are limits of the platform."""


class Holder(StrEnum):
    """Who has the bytes (`design.md` §2)."""

    ENGINE = "engine"
    PROCESS = "process"
    GRAPHICS = "graphics"
    MPS = "mps"
    SUSPENDED = "suspended"
    ORPHAN = "orphan"
    UNATTRIBUTED = "unattributed"


class Cause(StrEnum):
    """Why memory is an orphan (`design.md` §5)."""

    DEAD_PID = "dead_pid"
    DEFUNCT = "defunct"
    ENGINE_ORPHAN = "engine_orphan"
    CONTAINER_GONE = "container_gone"
    STUCK = "stuck"


class MemoryKind(StrEnum):
    """Which question NVML answered about memory."""

    DEDICATED = "dedicated"  # memory info v2: total = reserved + used + free
    DEDICATED_V1 = "dedicated_v1"  # v1: reserved is inside used
    UNIFIED = "unified"  # shared with the CPU: headroom is MemAvailable
    UNKNOWN = "unknown"


class EngineState(StrEnum):
    """What a declared or found engine is doing (`design.md` §4)."""

    READY = "ready"
    LOADING = "loading"
    ASLEEP = "asleep"
    DOWN = "down"
    UNAUTHORIZED = "unauthorized"
    NO_STATS = "no_stats"
    UNREACHABLE = "unreachable"


class Answer(StrEnum):
    """How an engine answered one poll."""

    OK = "ok"
    REFUSED = "refused"  # nobody listens
    UNAUTHORIZED = "unauthorized"  # 401 or 403
    NOT_METRICS = "not_metrics"  # 200, but no engine's metrics in it
    FAILED = "failed"  # timeout, reset, TLS, too large, encoded, any other status


# ---------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Health:
    """How one source is doing; travels beside its facts and is never inferred from them."""

    ok: bool
    seconds: float = 0.0
    reason: Reason | None = None
    detail: str = ""
    last_success_time: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """One reading of a GPU's or MIG instance's memory; `reserved_bytes` is None when v1 was asked."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """What NVML says one process has on one GPU. `kind` is compute, graphics or mps."""

    pid: int
    kind: str
    used_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A MIG GPU instance: its memory belongs to all compute instances in it."""

    id: int
    profile: str
    memory: Memory | None = None
    processes: tuple[GpuProcess, ...] | None = None
    gaps: frozenset[Gap] = frozenset()
    memory_kind: MemoryKind = MemoryKind.DEDICATED


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    `up` is None while the GPU sleeps. `processes` is None when NVML would not list them.
    """

    index: int | None
    uuid: str
    pci_bus_id: str
    name: str = ""
    minor: int | None = None
    up: bool | None = True
    detail: str = ""
    memory: Memory | None = None
    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    gpu_ratio: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: bool = False
    instances: tuple[GpuInstance, ...] = ()
    gaps: frozenset[Gap] = frozenset()
    recovery_action: str | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Who a PID is, from /proc.

    `listening` and `remote` are None where its sockets could not be read. `init` is PID 1 of a PID namespace.
    `live_threads` and `children` are read for zombies, `stack` for a process that ignores SIGKILL, `remote` for
    relatives of an engine's worker that has no server. `memory_room_ratio` is what is left of the tightest memory limit
    of its cgroups, 1 without a limit, None where we may not look.
    """

    pid: int
    start_ticks: int
    comm: str
    state: str
    ppid: int
    user: str = ""
    cgroup: str = ""
    argv: tuple[str, ...] = ()
    listening: frozenset[int] | None = None
    session: int = 0
    init: bool = False
    frozen: bool = False
    sigkill: bool = False
    stack: str = ""
    live_threads: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    remote: bool | None = None
    memory_room_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class XidCount:
    """How often the driver reported one Xid for one GPU since the daemon started."""

    uuid: str
    xid: int
    count: int


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """One reading of every GPU, and of /proc for each PID that NVML named and its ancestors.

    `processes` also holds the relatives (same session or container) of workers without a server.
    `dead` are PIDs that NVML names and the kernel does not know; one that is only hidden from us is not among them.
    """

    driver_version: str
    gpus: tuple[Gpu, ...]
    processes: Mapping[int, Process] = field(default_factory=dict)
    host_pids: bool = True
    xids: tuple[XidCount, ...] = ()
    rejected: Mapping[str, int] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA display function in sysfs: the inventory that NVML is held against."""

    pci_bus_id: str
    suspended: bool = False
    uuid: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """What this daemon costs, under the names every Prometheus client uses."""

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    start_time: float
    open_fds: int
    max_fds: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host memory, the inventory of GPUs, and this daemon's own cost."""

    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_free_bytes: int | None = None
    gpus: tuple[PciGpu, ...] = ()
    own: OwnProcess | None = None
    shm_size_bytes: int | None = None
    shm_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRank:
    """What one rank of an engine says of itself; every field is what the page told, or None."""

    rank: str
    kv_used_ratio: float | None = None
    kv_capacity_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_capacity_bytes: int | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_for_capacity: int | None = None
    preemptions_total: int | None = None
    asleep: bool = False
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One poll of one engine, with what is known of the process that serves it."""

    name: str
    kind: str
    url: str
    answer: Answer
    declared: bool = True
    detail: str = ""
    seconds: float = 0.0
    version: str | None = None
    model_name: str | None = None
    max_model_len: int | None = None
    ranks: tuple[EngineRank, ...] = ()
    rejected: Mapping[str, int] = field(default_factory=dict)
    server: Process | None = None
    server_age_seconds: float | None = None
    local: bool = False
    port: int | None = None


Value: TypeAlias = int | float | str | bool | Sequence[int | str] | Sequence[Mapping[str, int]]
"""A field of an incident (`docs/incidents.md` names them): bytes are bytes, texts are as printed."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that went wrong, after de-duplication.

    *line* and *offset* are where it is first seen in its stream: lines from 1, bytes from 0.
    *engine* and *version* are empty when the log does not tell.
    """

    category: str
    severity: str
    fields: Mapping[str, Value]
    line: int
    offset: int
    engine: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """Where a log comes from: its *stream* (a name that outlives rotations) and whose it is.

    *kind* is file, docker, pod, journal or kernel (who speaks for the machine, in the journal too); *container_id* is a
    container's or a systemd unit's; *engine* is the configured name of the engine that writes it.
    """

    stream: str
    kind: str = "file"
    container_id: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a stream is read: *file* is the identity of its file, *head* a checksum of the file's first bytes."""

    file: str
    head: int
    offset: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """An incident with where and when it was seen: *file* is the identity of the file within the stream."""

    incident: Incident
    origin: LogOrigin
    file: str
    time: float


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What the logs have told: totals by category since the archive began, and the incidents of the last half hour
    (the newest 1,000).

    *gaps* counts by reason what could not be read without loss; *dropped_lines* are those a storm cost. *kernel* says
    whether the kernel's messages are read, *xids* counts those it told of by PCI address and number.
    """

    totals: Mapping[str, int] = field(default_factory=dict)
    last_times: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[Recorded, ...] = ()
    files: int = 0
    unreadable: int = 0
    dropped_lines: int = 0
    gaps: Mapping[str, int] = field(default_factory=dict)
    kernel: bool = False
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known at one moment. A source without fresh facts is None here and not `ok` in `health`."""

    time: float
    mono: float
    health: Mapping[str, Health] = field(default_factory=dict)
    nvml: NvmlFacts | None = None
    host: HostFacts | None = None
    engines: tuple[EngineFacts, ...] = ()
    containers: ContainerFacts | None = None
    logs: LogFacts | None = None
    complete: bool = True
    """Every enabled source has answered or failed at least once."""
    tick_lateness_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Container:
    """A container a runtime knows, with the names people know it by; each is empty when nobody told."""

    id: str
    name: str = ""
    namespace: str = ""
    pod: str = ""
    running: bool = True


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """Names of containers by id. `complete` are the runtimes that listed every container they know."""

    by_id: Mapping[str, Container] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()


# ---------------------------------------------------------------------------------------- conclusions


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where memory is: a GPU, or a MIG instance of it. Label values as DCGM Exporter spells them."""

    gpu: str
    uuid: str
    instance_id: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The static facts of one GPU, for `gpu_oom_gpu_info`."""

    place: Place
    product_name: str
    pci_bus_id: str
    device: str
    driver_version: str
    memory_kind: MemoryKind


@dataclass(frozen=True, slots=True)
class Headroom:
    """How much room one place has (`design.md` §2). Minima cover 60 s and, for serving, 5 min."""

    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    headroom_bytes: int | None = None
    headroom_ratio: float | None = None
    headroom_min_bytes: int | None = None
    promised_bytes: int | None = None
    serving_min_bytes: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """The Kubernetes or container name of a process; empty where it has none."""

    namespace: str = ""
    pod: str = ""
    container: str = ""


NO_WORKLOAD = Workload()


@dataclass(frozen=True, slots=True, order=True)
class Whose:
    """Whose an incident is: alert group, engine, GPU and workload; empty where that is not known."""

    group: str
    engine: str = ""
    gpu: str = ""
    uuid: str = ""
    workload: Workload = NO_WORKLOAD


@dataclass(frozen=True, slots=True)
class Holding:
    """The bytes one process has in one place, and what kind of holder it is."""

    pid: int
    comm: str
    holder: Holder
    used_bytes: int
    engine: str | None = None
    cause: Cause | None = None
    evidence: tuple[str, ...] = ()
    container: str = ""
    workload: Workload = NO_WORKLOAD


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who holds one place's memory. `held` is None when any term of the sum is unknown."""

    holdings: tuple[Holding, ...] = ()
    held: Mapping[Holder, int] | None = None
    complete: bool | None = None
    gaps: frozenset[Gap] = frozenset()
    orphaned: Mapping[Cause, int] | None = None
    orphaned_contexts: Mapping[Cause, int] | None = None
    idle_bytes: int | None = None
    newcomer_bytes: int | None = None
    overcommit_bytes: int | None = None
    seen_gaps: frozenset[Gap] = frozenset()
    """The gaps of this reading, confirmed or not."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What we tell of one rank of an engine."""

    rank: str
    kv_used_ratio: float | None = None
    kv_capacity_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_capacity_bytes: int | None = None
    kv_starved_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions_total: int | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What we tell of one engine."""

    name: str
    kind: str
    url: str
    state: EngineState
    version: str | None = None
    model_name: str | None = None
    derived: str = ""
    up: bool = False
    expected_up: bool | None = None
    stats_enabled: bool | None = None
    loading_seconds: float | None = None
    max_model_len: int | None = None
    ranks: tuple[RankReport, ...] = ()
    places: tuple[Place, ...] = ()
    pids: frozenset[int] = frozenset()
    budgets: Mapping[Place, int] = field(default_factory=dict)
    memory_available_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Every conclusion of one tick; `catalog/metrics.py` reads nothing else."""

    time: float
    health: Mapping[str, Health] = field(default_factory=dict)
    gpus: tuple[GpuIdentity, ...] = ()
    gpu_up: Mapping[Place, bool] = field(default_factory=dict)
    recovery_actions: Mapping[Place, str] = field(default_factory=dict)
    xids: Mapping[tuple[Place, int], int] = field(default_factory=dict)
    headroom: Mapping[Place, Headroom] = field(default_factory=dict)
    ownership: Mapping[Place, Ownership] = field(default_factory=dict)
    process_bytes: Mapping[tuple[Place, str, Workload, str], int] = field(default_factory=dict)
    engines: tuple[EngineReport, ...] = ()
    host: HostFacts | None = None
    logs: LogFacts | None = None
    incidents: Mapping[str, int] = field(default_factory=dict)
    incidents_recent: Mapping[Whose, int] = field(default_factory=dict)
    engine_deaths: Mapping[str, int] = field(default_factory=dict)
    tick_lateness_seconds: float = 0.0


Sample: TypeAlias = tuple[tuple[str, ...], float]
"""One line of a metrics page: label values in the order of the metric's labels, and the value.

The one thing here that is no dataclass: hundreds are made per scrape, and a tuple costs a fifth.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples, ready to be written by `publish/exposition.py`."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]
