"""Which lines are one incident? Repeats, ranks, consequences and retries, within a window of lines and time.

An `Episode` is an incident in the making. It closes when its window has passed, and only then is it judged:
lines after the first may still change what it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpu_oom_exporter.analysis.incidents.episodes import Episode, Sighting
from gpu_oom_exporter.analysis.incidents.judging import judge
from gpu_oom_exporter.analysis.incidents.lines import Speaker
from gpu_oom_exporter.catalog.categories import CATEGORIES, Severity
from gpu_oom_exporter.catalog.signatures import Role
from gpu_oom_exporter.model import Incident, Value

MOST_OPEN = 64
"""Open episodes of one stream; the oldest is told early when there are more."""

DETAIL_LINES = 400
"""How long a detail waits for the line it belongs to (a kernel OOM report has up to 300 lines of tasks between)."""

_FAMILY = {
    "kv_cache_preemption": "kv", "kv_cache_exhausted": "kv",
    "kv_cache_no_blocks": "kv_start", "kv_cache_below_max_model_len": "kv_start",
    "host_oom_kill_global": "oom_kill", "host_oom_kill_cgroup": "oom_kill",
    "alloc_retry_recovered": "device", "engine_core_died": "death",
}  # fmt: skip

FOLDS: dict[str, frozenset[str]] = {
    "worker_sigkilled": frozenset({"oom_kill", "host_oom_kill_userspace"}),
    "k8s_gpu_unavailable": frozenset({"gpu_lost"}),
    "device": frozenset({"batch_budget_too_large"}),
}
"""Family → families beside which it is only a consequence; `death` is one beside every serious family."""

NEVER_A_CAUSE = frozenset(
    {"death", "kv_cache_preemption", "proxy_upstream_died", "proxy_upstream_not_ready", "ssh_publickey_denied"}
)

SHARED_BY_RANKS = frozenset({"kv", "nccl_timeout"})
"""Families where several ranks report one event."""


def family_of(category: str) -> str:
    """What may merge: categories of one family are views of one event."""
    return _FAMILY.get(category, "device" if category.startswith("cuda_oom_") else category)


class Folder:
    """The open episodes of one stream."""

    def __init__(self) -> None:
        self.open: list[Episode] = []
        self.details: deque[Sighting] = deque(maxlen=32)
        self.engine = ""
        self.version = ""

    @property
    def low_water(self) -> int | None:
        """Offset of the first byte of the oldest open episode; reading from there again loses nothing."""
        return min((episode.offset for episode in self.open), default=None)

    def start(self, stream: str, engine: str, version: str) -> list[Incident]:
        """A new run begins in *stream*: what is open there is over."""
        over = [episode for episode in self.open if episode.stream == stream and episode.family != "oom_kill"]
        self.open = [episode for episode in self.open if episode not in over]
        told = self._tell(over)
        self.engine, self.version = engine, version
        return told

    def expire(self, number: int, clock: str = "", time: float | None = None) -> list[Incident]:
        """Tell what no line from here on can belong to."""
        over = [episode for episode in self.open if not episode.near(number, clock, time)]
        if not over and len(self.open) <= MOST_OPEN:
            return []
        if len(self.open) - len(over) > MOST_OPEN:
            over += sorted((e for e in self.open if e not in over), key=lambda e: e.last)[: len(self.open) - MOST_OPEN]
        self.open = [episode for episode in self.open if episode not in over]
        return self._tell(over)

    def close(self) -> list[Incident]:
        """Tell everything."""
        over, self.open = self.open, []
        return self._tell(over)

    def _tell(self, over: Iterable[Episode]) -> list[Incident]:
        told = (judge(episode) for episode in sorted(over, key=lambda e: (e.number, e.offset)))
        return [incident for incident in told if incident is not None]

    def settled(self, seen: Sighting) -> bool:
        """Whether the episode that *seen* belongs to needs no more tracebacks to be read."""
        episode = self._find(family_of(seen.claim.category), seen)
        if episode is None:
            return False
        episode.looks += 1
        return (bool(episode.frames) and episode.rank is not None) or episode.looks > 3

    def add(self, seen: Sighting) -> list[Incident]:
        """One claimed line; returns the incidents that are over by now."""
        told = self.expire(seen.number, seen.clock, seen.time)
        signature = seen.claim.signature
        category = seen.claim.category
        family = family_of(category)
        if signature.role is Role.DETAIL:
            for name in (category, *signature.also):
                if (episode := self._find(family_of(name), seen)) is not None:
                    episode.take(seen)
            self.details.append(seen)
            return told
        if signature.role is Role.CONSEQUENCE or (category in ("gpu_xid_info",) and seen.claim.fields.get("xid") == 45):
            if self._caused(seen, family):
                return told
        elif any(e.family in FOLDS.get(family, ()) and self._together(e, seen) for e in self.open) or (
            signature.echo and any(e.family == signature.echo for e in self.open) and self._find(family, seen) is None
        ):
            return told
        episode = self._find(family, seen)
        if episode is None:
            episode = self._begin(family, seen)
        episode.take(seen)
        if signature.role is Role.CAUSE:
            self._drop_consequences(episode)
        return told

    def _begin(self, family: str, seen: Sighting) -> Episode:
        speaker = seen.speaker
        episode = Episode(
            family, seen.number, seen.offset, seen.number, identity(speaker), speaker.kind, seen.pid, speaker.rank
        )
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
        for name in ("pci", "upstream", "host", "cgroup"):
            if name in fields and name in episode.fields and fields[name] != episode.fields[name]:
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
            return True
        pid = seen.pid[1]
        if pid is not None and episode.pid[1] is not None and pid != episode.pid[1]:
            if seen.speaker.kind == episode.kind:
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

    def _caused(self, seen: Sighting, family: str) -> bool:
        return any(_is_cause(e, family) and self._together(e, seen) and _same_gpu(e, seen) for e in self.open)

    def _drop_consequences(self, cause: Episode) -> None:
        """A cause was seen: what only follows from it is not told."""
        kept = []
        for episode in self.open:
            follows = episode.family in ("death",) and _is_cause(cause, "death")
            follows |= cause.family in FOLDS.get(episode.family, ())
            follows |= cause.family == "host_alloc_failure" and episode.family == "device" and episode.only_echoes
            if (
                follows
                and episode is not cause
                and (not episode.stream or not cause.stream or episode.stream == cause.stream)
            ):
                cause.number, cause.offset = min((cause.number, cause.offset), (episode.number, episode.offset))
                if episode.family == "device":
                    cause.fields = {**episode.fields, **cause.fields}
                continue
            kept.append(episode)
        self.open = kept


def _is_cause(episode: Episode, family: str) -> bool:
    """Whether *episode* explains a consequence of *family*."""
    if family == "gpu_xid_info":
        return ("xid" in episode.fields and episode.fields["xid"] != 45) or episode.family == "gpu_lost"
    if episode.family in NEVER_A_CAUSE or episode.family in ("death",):
        return False
    worst = {CATEGORIES[category].severity for category in episode.categories}
    return bool(worst & {Severity.ERROR, Severity.CRITICAL})


def _same_gpu(episode: Episode, seen: Sighting) -> bool:
    mine, its = seen.claim.fields.get("pci"), episode.fields.get("pci")
    return mine is None or its is None or mine == its


def _same_numbers(known: dict[str, Value], new: object) -> bool:
    """Whether a parent's copy of a message says the same as the original."""
    assert isinstance(new, dict)
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
