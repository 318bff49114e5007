"""What is this episode? The category from all its lines, by the order of the corpus' rule 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_oom_exporter.analysis.incidents.episodes import Episode
from gpu_oom_exporter.catalog.categories import CATEGORIES
from gpu_oom_exporter.catalog.signatures import PHASE_CATEGORY
from gpu_oom_exporter.model import Incident, Value

INTERNAL = frozenset({"constraint", "version"})
"""Fields that only help to judge."""


def judge(episode: Episode) -> Incident:
    """The incident that *episode* is."""
    category = _category(episode)
    fields = {name: value for name, value in episode.fields.items() if name not in INTERNAL}
    if episode.pid[1] is not None:
        fields["pid"] = episode.pid[1]
    if len(episode.ranks) > 1:
        fields["ranks"] = tuple(episode.ranks)
    elif episode.rank is not None:
        fields["rank"] = episode.rank
    if category == "kv_cache_exhausted":
        fields.pop("mode", None)
    severity = CATEGORIES[category].severity.value
    return Incident(category, severity, fields, episode.number, episode.offset, episode.engine, episode.version)


def _category(episode: Episode) -> str:
    if episode.family == "device":
        return device_category(episode)
    if episode.family == "kv":
        return "kv_cache_exhausted" if "kv_cache_exhausted" in episode.categories else "kv_cache_preemption"
    if episode.family == "oom_kill":
        # the kernel's own lines decide; systemd and the runtime cannot tell a global kill from a cgroup's
        if episode.fields.get("constraint") == "MEMCG":
            return "host_oom_kill_cgroup"
        return "host_oom_kill_global" if "host_oom_kill_global" in episode.categories else "host_oom_kill_cgroup"
    return episode.categories[0]


def device_category(episode: Episode) -> str:
    """Recovered retry, then phase, fraction limit, fragmentation, co-tenant, runtime, generic."""
    if episode.retried and not episode.failed_again:
        return "alloc_retry_recovered"
    if episode.categories and set(episode.categories) <= {"cuda_oom_library"}:
        return "cuda_oom_library"
    seen = episode.phases | episode.frames or {episode.standing}
    for phase, category in PHASE_CATEGORY.items():
        if phase in seen:
            return category
    fields = episode.fields
    if "cuda_oom_fraction_limit" in episode.categories or fraction_limited(fields):
        return "cuda_oom_fraction_limit"
    if fragmented(fields):
        return "cuda_oom_fragmentation"
    if co_tenants(fields):
        return "cuda_oom_co_tenant"
    if "runtime" in seen:
        return "cuda_oom_runtime"
    # a library's complaint beside the allocator's own adds nothing
    known = (
        c for c in episode.categories if c not in ("cuda_oom_generic", "cuda_oom_library", "alloc_retry_recovered")
    )
    return next(known, "cuda_oom_generic")


def _number(fields: Mapping[str, Value], name: str) -> int | None:
    value: Any = fields.get(name)
    return value if isinstance(value, int) else None


def fraction_limited(fields: Mapping[str, Value]) -> bool:
    """Whether the GPU had room and only the process's own limit refused."""
    allowed, free, tried = (_number(fields, f"{name}_bytes") for name in ("allowed", "free", "tried"))
    total = _number(fields, "total_bytes")
    if allowed is None or tried is None or free is None:
        return False
    return free >= tried and (total is None or allowed < total)


def fragmented(fields: Mapping[str, Value]) -> bool:
    """Whether the pool held enough but in pieces: rule 8 of the corpus.

    Reserved but unallocated memory covers the request while the driver's free memory does not, or less than
    half of a pool that could have served it is in live allocations. A pool whose size is not printed is the
    device's limit less what the driver has free.
    """
    tried, free, total = (_number(fields, f"{name}_bytes") for name in ("tried", "free", "total"))
    allocated, unallocated = _number(fields, "allocated_bytes"), _number(fields, "reserved_unallocated_bytes")
    if tried is not None and unallocated is not None and free is not None and unallocated >= tried and free < tried:
        return True
    if allocated is None:
        return False
    if unallocated is not None:
        pool = allocated + unallocated
    elif total is not None and free is not None:
        pool = total - free
    else:
        return False
    # what lies unused must have been able to serve the request: a small pool on a GPU full of others is whole
    missing = max(0, (tried or 0) - (free or 0))
    return pool > 0 and allocated < pool / 2 and pool - allocated >= missing


def listed(fields: Mapping[str, Value]) -> Sequence[Mapping[str, int]]:
    """The processes that the allocator's text names."""
    value: Any = fields.get("listed_processes")
    return value if isinstance(value, list | tuple) else ()


def co_tenants(fields: Mapping[str, Value]) -> list[int]:
    """PIDs of other processes without which the request would have fitted: rule 7 of the corpus.

    Only when the process found itself ("this process has"): in a container it cannot, and the process listed is itself.
    """
    own, tried, free = (_number(fields, f"{name}_bytes") for name in ("process", "tried", "free"))
    if not own or tried is None or free is None:
        return []
    return [p["pid"] for p in listed(fields) if p["used_bytes"] >= max(1, tried - free)]
