"""Which lines are one incident? Repeats, ranks, consequences and retries, within a window of lines and time.

An `Episode` is an incident in the making. It closes when its window has passed, and only then is it judged:
lines after the first may still change what it is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping

from gpu_oom_exporter.analysis.incidents.episodes import Episode, Sighting
from gpu_oom_exporter.analysis.incidents.judging import judge
from gpu_oom_exporter.analysis.incidents.lines import Speaker
from gpu_oom_exporter.catalog.categories import CATEGORIES, Group, Severity
from gpu_oom_exporter.catalog.signatures import Role
from gpu_oom_exporter.catalog.transcripts import ENGINE_TASK
from gpu_oom_exporter.model import Incident, Value

MOST_OPEN = 64
"""Open episodes of one stream; the oldest is told early when there are more."""

SETTLE_SECONDS, SETTLE_DEATH_SECONDS = 0.7, 5.0
"""How long after its last line an incident of a followed log is told; a death waits for its cause."""

DETAIL_LINES = 400
"""How long a detail waits for the line it belongs to (a kernel OOM report has up to 300 lines of tasks between)."""

_FAMILY = {
    "kv_cache_preemption": "kv", "kv_cache_exhausted": "kv",
    "kv_cache_no_blocks": "kv_start", "kv_cache_below_max_model_len": "kv_start",
    "host_oom_kill_global": "oom_kill", "host_oom_kill_cgroup": "oom_kill",
    "alloc_retry_recovered": "device", "engine_core_died": "death",
}  # fmt: skip

FOLDS: dict[str, frozenset[str]] = {
    "k8s_gpu_unavailable": frozenset({"gpu_lost"}),
    "device": frozenset({"batch_budget_too_large"}),
}
"""Family → families beside which it is only a consequence; `death` is one beside every serious family."""

CAUSES_OF_DEATH = frozenset(
    row.name
    for row in CATEGORIES.values()
    if row.severity in (Severity.ERROR, Severity.CRITICAL)
    and (row.group in (Group.CUDA_OOM, Group.STARTUP, Group.HOST_OOM, Group.ENGINE_DIED, Group.GPU)
         or row.name in ("kv_cache_exhausted", "gpu_kernel_smem_limit", "fabric_manager_not_ready",
                         "nvidia_driver_not_loaded", "driver_library_mismatch", "container_gpu_access_lost"))
) - {"engine_core_died"}  # fmt: skip
"""Categories that explain a dead engine."""

KILLERS = frozenset({"oom_kill", "host_oom_kill_userspace"})
"""Families that explain a SIGKILL."""

ENGINE_NAME = re.compile(ENGINE_TASK, re.I)

KILL_LINES, KILL_SECONDS = 400, 30.0
"""A parent sees the SIGKILL of its child at once; the kernel's report of all tasks may stand between."""

LATE_SECONDS = 1800.0
"""A dead engine is reported for every request until it is restarted; for this long that is no new death."""

MOST_PAST = 16
"""Told incidents that are remembered as explanations."""

XID_LINES = 50
"""The driver may print the channel removal (Xid 45) just before the Xid that caused it."""

SHARED_BY_RANKS = frozenset({"kv", "nccl_timeout"})
"""Families where several ranks report one event."""


def family_of(category: str) -> str:
    """What may merge: categories of one family are views of one event."""
    return _FAMILY.get(category, "device" if category.startswith("cuda_oom_") else category)


class Folder:
    """The open episodes of one stream."""

    def __init__(self) -> None:
        self.open: list[Episode] = []
        self.past: deque[Episode] = deque(maxlen=MOST_PAST)
        self.details: deque[Sighting] = deque(maxlen=32)
        self.engine = ""
        self.version = ""

    @property
    def low_water(self) -> int | None:
        """Offset of the first byte of the oldest open episode; reading from there again loses nothing."""
        return min((episode.offset for episode in self.open), default=None)

    def start(self, stream: str, engine: str, version: str, pid: int | None = None) -> list[Incident]:
        """A new run begins in *stream*, or in its process *pid*: what is open there is over."""
        over = [e for e in self.open if e.stream == stream and e.family != "oom_kill" and pid in (None, e.pid[1])]
        self.open = [episode for episode in self.open if episode not in over]
        told = self._tell(over)
        self.forget(stream)
        self.engine, self.version = engine, version
        return told

    def forget(self, stream: str) -> None:
        """An engine of *stream* lives again: what was told explains no further death."""
        for episode in [e for e in self.past if e.stream == stream]:
            self.past.remove(episode)

    def expire(self, number: int, clock: str = "", time: float | None = None) -> list[Incident]:
        """Tell what no line from here on can belong to."""
        near = [episode for episode in self.open if episode.near(number, clock, time)]
        if len(near) > MOST_OPEN:
            near = sorted(near, key=lambda episode: episode.last)[-MOST_OPEN:]
        if len(near) == len(self.open):
            return []
        over = [episode for episode in self.open if episode not in near]
        self.open = near
        return self._tell(over)

    def settle(self, now: float) -> list[Incident]:
        """Tell the episodes that had no new line for a while, without closing them: who is paged cannot wait."""
        told = []
        for episode in self.open:
            if episode.told:
                continue
            if episode.settled_last != episode.last or episode.arrived is None:
                episode.settled_last, episode.arrived = episode.last, now
            wait = SETTLE_DEATH_SECONDS if episode.family == "death" else SETTLE_SECONDS
            if now - episode.arrived >= wait:
                episode.told = True
                told.append(judge(episode))
        return told

    def close(self) -> list[Incident]:
        """Tell everything."""
        over, self.open = self.open, []
        return self._tell(over)

    def _tell(self, over: Iterable[Episode]) -> list[Incident]:
        ordered = sorted(over, key=lambda episode: (episode.number, episode.offset))
        self.past.extend(episode for episode in ordered if episode.family == "death" or _explains_death(episode))
        return [judge(episode) for episode in ordered if not episode.told]

    def is_new(self, seen: Sighting) -> bool:
        """Whether *seen* belongs to no open episode."""
        return self._find(family_of(seen.claim.category), seen) is None

    def settled(self, seen: Sighting) -> bool:
        """Whether the episode that *seen* belongs to needs no more tracebacks to be read."""
        episode = self._find(family_of(seen.claim.category), seen)
        if episode is None:
            return False
        episode.looks += 1
        return (bool(episode.frames) and episode.rank is not None) or episode.looks > 3

    def add(self, seen: Sighting) -> list[Incident]:
        """One claimed line; returns the incidents that are over by now."""
        # a borrowed time tells two tracebacks apart, not a line and the traceback that explains it
        told = self.expire(seen.number, seen.clock, seen.time if seen.frames or not seen.borrowed else None)
        signature = seen.claim.signature
        category = seen.claim.category
        family = family_of(category)
        if signature.role is Role.DETAIL:
            for name in (category, *signature.also):
                if (episode := self._find(family_of(name), seen)) is not None:
                    episode.take(seen)
            self.details.append(seen)
            return told
        if signature.role is Role.CONSEQUENCE:
            if self._died_of(seen):
                return told
        elif seen.claim.fields.get("xid") == 45:
            if any(
                _is_xid(e) and self._together(e, seen) and _same_gpu(e.fields, seen.claim.fields) for e in self.open
            ):
                return told
        elif family == "worker_sigkilled":
            if any(
                self._together(e, seen) and _could_kill(e, seen.number, seen.clock, seen.time, seen.pid[1])
                for e in self.open
            ):
                return told
        elif any(e.family in FOLDS.get(family, ()) and self._together(e, seen) for e in self.open) or (
            signature.echo and any(e.family == signature.echo for e in self.open) and self._find(family, seen) is None
        ):
            return told
        episode = self._find(family, seen)
        if episode is None:
            episode = self._begin(family, seen)
        episode.take(seen)
        if signature.role is Role.CONSEQUENCE:
            episode.mourners.add((seen.pid[1], signature.name))
        if signature.role is Role.CAUSE:
            self._drop_consequences(episode)
        return told

    def _begin(self, family: str, seen: Sighting) -> Episode:
        speaker = seen.speaker
        episode = Episode(
            family, seen.number, seen.offset, seen.number, identity(speaker), seen.kind, seen.pid, speaker.rank
        )
        episode.node = speaker.node
        episode.engine = seen.claim.signature.engine or engine_of(speaker) or self.engine
        episode.version = self.version if episode.engine in ("", self.engine) else ""
        self.open.append(episode)
        for detail in self.details:
            signature = detail.claim.signature
            families = {family_of(name) for name in (signature.category, *signature.also)}
            if family in families and seen.number - detail.number <= DETAIL_LINES:
                if signature.phase and detail.speaker.pid != speaker.pid:
                    continue
                if self._same(episode, detail):
                    episode.take(detail)
        return episode

    def _find(self, family: str, seen: Sighting) -> Episode | None:
        """The open episode that *seen* is a part of."""
        matching = [e for e in self.open if e.family == family and self._same(e, seen)]
        exact = [e for e in matching if e.pid[1] is not None and e.pid[1] == seen.pid[1]]
        best = exact or matching
        return best[-1] if best else None

    def _same(self, episode: Episode, seen: Sighting) -> bool:
        fields, detail = seen.claim.fields, seen.claim.signature.role is Role.DETAIL
        if not self._together(episode, seen):
            return False
        for name in IDENTIFYING:
            if name in fields and name in episode.fields and not _same_name(fields[name], episode.fields[name]):
                return False
        if seen.speaker.node and episode.node and seen.speaker.node != episode.node:
            return False
        if (
            "gpu" in fields
            and "gpu" in episode.fields
            and fields["gpu"] != episode.fields["gpu"]
            and "gpu" not in episode.weak
        ):
            return False
        if "xid" in fields and (fields["xid"], fields.get("pid")) != (episode.fields.get("xid"), episode.pid[1]):
            return episode.family == "gpu_lost"
        if episode.family in SHARED_BY_RANKS:
            return _replica(seen.speaker.rank) == _replica(episode.rank)
        pid = seen.pid[1]
        if pid is not None and episode.pid[1] is not None and pid != episode.pid[1]:
            if seen.kind == episode.kind:
                return False
            return detail or _same_numbers(episode.fields, fields)
        if pid is None and seen.speaker.rank is not None and episode.rank is not None:
            return seen.speaker.rank == episode.rank
        return True

    @staticmethod
    def _together(episode: Episode, seen: Sighting) -> bool:
        """Whether both can be of one container or unit."""
        stream = identity(seen.speaker)
        return not stream or not episode.stream or stream == episode.stream

    def _died_of(self, seen: Sighting) -> bool:
        """Whether an incident explains the death, or the same process has reported it before."""
        mourner = (seen.pid[1], seen.claim.signature.name)
        for episode in self.open:
            if _explains_death(episode) and self._together(episode, seen):
                episode.mourners.add(mourner)
                return True
        for episode in self.past:
            gap = episode.gap(seen.clock, seen.time)
            if (
                mourner in episode.mourners
                and gap is not None
                and gap <= LATE_SECONDS
                and self._together(episode, seen)
            ):
                return True
        return False

    def _drop_consequences(self, cause: Episode) -> None:
        """A cause was seen: what only follows from it is not told."""
        kept = []
        for episode in self.open:
            follows = episode.family == "death" and _explains_death(cause)
            follows |= cause.family in FOLDS.get(episode.family, ())
            follows |= cause.family == "host_alloc_failure" and episode.family == "device" and episode.only_echoes
            if episode.family == "worker_sigkilled":
                clock = next((name for name in episode.times if name in cause.times), "")
                follows |= _could_kill(cause, episode.last, clock, episode.times.get(clock), episode.pid[1])
            follows |= _channel_removed_before(episode, cause)
            here = not episode.stream or not cause.stream or episode.stream == cause.stream
            if follows and episode is not cause and here:
                cause.mourners |= episode.mourners
                cause.number, cause.offset = min((cause.number, cause.offset), (episode.number, episode.offset))
                if episode.family == "device":
                    cause.fields = {**episode.fields, **cause.fields}
                continue
            kept.append(episode)
        self.open = kept


def _explains_death(episode: Episode) -> bool:
    """Whether an engine can have died of it: it happened to a process that can be an engine's."""
    return not CAUSES_OF_DEATH.isdisjoint(episode.categories) and _can_be_engine(episode)


def _can_be_engine(episode: Episode) -> bool:
    """Whether the victim, as far as it has a name, can be of an engine; `java` and mysql.service are not."""
    names = [episode.fields[name] for name in ("task", "process", "unit", "cgroup", "pod") if name in episode.fields]
    return not names or any(isinstance(name, str) and ENGINE_NAME.search(name) is not None for name in names)


def _is_xid(episode: Episode) -> bool:
    """Whether *episode* is a fault of the GPU that Xid 45 can follow from."""
    return episode.fields.get("xid", 45) != 45 or episode.family == "gpu_lost"


def _channel_removed_before(episode: Episode, cause: Episode) -> bool:
    if episode.fields.get("xid") != 45 or not _is_xid(cause) or cause.last - episode.last > XID_LINES:
        return False
    return _same_gpu(episode.fields, cause.fields)


def _could_kill(killer: Episode, number: int, clock: str, time: float | None, pid: int | None) -> bool:
    """Whether the OOM killer's victim can be the child whose SIGKILL was seen there."""
    if killer.family not in KILLERS or abs(number - killer.last) > KILL_LINES:
        return False
    gap = killer.gap(clock, time)
    same = pid is not None and killer.pid[1] == pid
    return (gap is None or gap <= KILL_SECONDS) and (same or _can_be_engine(killer))


IDENTIFYING = ("pci", "upstream", "host", "cgroup", "unit", "worker", "pod", "namespace", "container", "step", "device")
"""Fields that tell one incident from another of its kind."""


def _same_name(one: Value, other: Value) -> bool:
    """Equal; for URLs, of one server: each path is not a backend of its own."""
    if isinstance(one, str) and isinstance(other, str):
        return ORIGIN.sub(r"\1", one) == ORIGIN.sub(r"\1", other)
    return one == other


ORIGIN = re.compile(r"^(\w+://[^/]+).*$")


def _replica(rank: int | str | None) -> str:
    """The data-parallel part of SGLang's rank: each replica has a KV pool of its own."""
    found = re.search(r"DP\d+", rank) if isinstance(rank, str) else None
    return found[0] if found else ""


def _same_gpu(one: Mapping[str, Value], other: Mapping[str, Value]) -> bool:
    mine, its = one.get("pci"), other.get("pci")
    return mine is None or its is None or mine == its


def _same_numbers(known: Mapping[str, Value], new: Mapping[str, Value]) -> bool:
    """Whether a parent's copy of a message says the same as the original."""
    return all(known.get(name, value) == value for name, value in new.items() if name.endswith("_bytes"))


def identity(speaker: Speaker) -> str:
    """The container, service or program that speaks; empty when a line does not tell, or tells of others."""
    if speaker.stream:
        return speaker.stream
    return f"{speaker.program}[{speaker.reporter_pid}]" if speaker.reporter_pid is not None else ""


def engine_of(speaker: Speaker) -> str:
    """Which engine writes such prefixes; empty when several do."""
    if (
        speaker.name.startswith(("EngineCore", "APIServer", "ApiServer", "VllmWorker", "Worker_", "RayWorkerWrapper"))
        or speaker.name == "Worker"
    ):
        return "vllm"
    return "sglang" if isinstance(speaker.rank, str) else ""
