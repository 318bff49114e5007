"""What is each engine doing, and on which GPUs? States, KV pools, budgets, and the join to processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gpu_oom_exporter.analysis.history import History, RankHistory
from gpu_oom_exporter.analysis.names import label
from gpu_oom_exporter.analysis.ownership import places
from gpu_oom_exporter.model import (
    Answer,
    EngineFacts,
    EngineRank,
    EngineReport,
    EngineState,
    HostFacts,
    NvmlFacts,
    Place,
    Process,
    RankReport,
)

STARVED_RATIO = 0.95
"""From here on a pool is full for the purpose of starvation: 0.95 to 1.0 is the saturated state (`design.md` §2)."""


def judge(
    facts: Iterable[EngineFacts],
    nvml: NvmlFacts | None,
    history: History,
    mono: float,
    host: HostFacts | None = None,
) -> tuple[EngineReport, ...]:
    """What to tell of each engine."""
    reports = []
    ranks_seen = set()
    for engine in facts:
        state = state_of(engine, history)
        if state in (EngineState.READY, EngineState.ASLEEP, EngineState.NO_STATS) and nvml is not None:
            history.served[engine.name] = {(p.pid, p.start_ticks) for p in _listeners(engine, nvml)}
        pids = join(engine, nvml) if nvml is not None else frozenset()
        where = _where(pids, nvml)
        known = state in (EngineState.READY, EngineState.ASLEEP)
        by_label = {label(rank.rank): rank for rank in engine.ranks} if known else {}
        ranks = tuple(_rank(engine, name, rank, history, mono) for name, rank in by_label.items())
        ranks_seen |= {(engine.name, rank.rank) for rank in ranks}
        if engine.model_name:
            history.models[engine.name] = label(engine.model_name)
        if engine.version:
            history.versions[engine.name] = label(engine.version)
        answered = engine.answer in (Answer.OK, Answer.UNAUTHORIZED)
        reports.append(
            EngineReport(
                name=engine.name,
                kind=engine.kind,
                url=engine.url,
                state=state,
                version=history.versions.get(engine.name),
                model_name=history.models.get(engine.name),
                derived="kv_cache_used_tokens" if any(r.kv_used_tokens is not None for r in engine.ranks) else "",
                up=answered,
                expected_up=(answered or state is EngineState.LOADING) if engine.declared else None,
                stats_enabled=bool(engine.ranks) if engine.answer is Answer.OK else None,
                loading_seconds=engine.server_age_seconds if state is EngineState.LOADING else None,
                max_model_len=engine.max_model_len,
                ranks=ranks,
                places=tuple(where),
                pids=pids,
                budgets=_budgets(engine, where),
                memory_available_ratio=_memory_available_ratio(pids, nvml, host),
            )
        )
    for key in history.ranks.keys() - ranks_seen:
        del history.ranks[key]
    return tuple(reports)


def _memory_available_ratio(pids: frozenset[int], nvml: NvmlFacts | None, host: HostFacts | None) -> float | None:
    """What is left of the tightest of the host's RAM and the memory limits over *pids*; None unless all are known."""
    if nvml is None or host is None or not host.memory_total_bytes or host.memory_available_bytes is None:
        return None
    rooms = [process.memory_room_ratio for pid, process in nvml.processes.items() if pid in pids]
    known = [room for room in rooms if room is not None]
    if not known or len(known) < len(rooms):
        return None
    return min(host.memory_available_bytes / host.memory_total_bytes, *known)


def state_of(engine: EngineFacts, history: History) -> EngineState:
    """The state of *engine* (`design.md` §4). A process that has served before and does not any more is not loading."""
    if engine.answer is Answer.OK:
        if not engine.ranks:
            return EngineState.NO_STATS
        return EngineState.ASLEEP if all(rank.asleep for rank in engine.ranks) else EngineState.READY
    if engine.answer is Answer.UNAUTHORIZED:
        return EngineState.UNAUTHORIZED
    server = engine.server
    if server is not None and (server.pid, server.start_ticks) not in history.served.get(engine.name, ()):
        return EngineState.LOADING  # a process is on its way to listen; a proxy in front may answer already
    return EngineState.DOWN if engine.answer is Answer.REFUSED else EngineState.UNREACHABLE


def join(engine: EngineFacts, nvml: NvmlFacts) -> frozenset[int]:
    """PIDs that hold VRAM for *engine*: those whose ancestor, or self, listens on its port or is starting to."""
    if not engine.local or not nvml.host_pids:
        return frozenset()
    heads = {p.pid for p in _listeners(engine, nvml)}
    if engine.server is not None:
        heads.add(engine.server.pid)
    if not heads:
        return frozenset()
    holders = {p.pid for gpu in nvml.gpus for _, _, processes, _ in places(gpu) for p in processes or ()}
    return frozenset(pid for pid in holders if _descends(pid, heads, nvml))


def _listeners(engine: EngineFacts, nvml: NvmlFacts) -> list[Process]:
    """The processes of this host that listen on *engine*'s port."""
    if not engine.local:
        return []
    return [p for p in nvml.processes.values() if p.listening and engine.port in p.listening]


def _descends(pid: int, heads: set[int], nvml: NvmlFacts) -> bool:
    for _ in range(64):  # deeper than any real tree; a torn read of /proc could make a loop
        if pid in heads:
            return True
        process = nvml.processes.get(pid)
        if process is None:
            return False
        pid = process.ppid
    return False


def _where(pids: frozenset[int], nvml: NvmlFacts | None) -> dict[Place, int | None]:
    """The places where *pids* hold memory, with what CUDA calls its total: all but what the driver reserves."""
    if nvml is None or not pids:
        return {}
    return {
        place: memory.total_bytes - (memory.reserved_bytes or 0) if memory else None
        for gpu in nvml.gpus
        for place, memory, processes, _ in places(gpu)
        if any(p.pid in pids for p in processes or ())
    }


def _budgets(engine: EngineFacts, where: Mapping[Place, int | None]) -> dict[Place, int]:
    """What the engine may take on each GPU: ceil(CUDA's total × gpu_memory_utilization) (vLLM's request_memory)."""
    share = next((r.gpu_memory_utilization for r in engine.ranks if r.gpu_memory_utilization is not None), None)
    if share is None and engine.server is not None:
        share = _share_in(engine.server.argv)
    if share is None:
        return {}
    return {place: math.ceil(total * share) for place, total in where.items() if total is not None}


def _share_in(argv: tuple[str, ...]) -> float | None:
    """`--gpu-memory-utilization` of a loading engine; void when the pool's size was given in bytes."""
    found = None
    for at, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag.startswith("--kv-cache-memory"):
            return None
        if flag in ("--gpu-memory-utilization", "-gmu"):
            text = value if equals else (argv[at + 1] if at + 1 < len(argv) else "")
            try:
                found = float(text)
            except ValueError:
                return None
    return found if found is not None and 0 < found <= 1 else None


def _rank(engine: EngineFacts, name: str, rank: EngineRank, history: History, mono: float) -> RankReport:
    remembered = history.ranks.setdefault((engine.name, name), RankHistory())
    if remembered.seen is not rank:
        remembered.seen = rank
        _remember(remembered, rank, mono)
    if rank.asleep:  # the pool is not there
        return RankReport(name, running=rank.running, waiting=rank.waiting, preemptions_total=rank.preemptions_total)
    return RankReport(
        name,
        rank.kv_used_ratio,
        rank.kv_capacity_tokens,
        rank.kv_used_tokens,
        rank.kv_capacity_bytes,
        remembered.starved.ratio(),
        rank.running,
        rank.waiting,
        rank.preemptions_total,
    )


def _remember(remembered: RankHistory, rank: EngineRank, mono: float) -> None:
    waiting = rank.waiting_for_capacity if rank.waiting_for_capacity is not None else rank.waiting
    before, now = remembered.preemptions, rank.preemptions_total
    preempted = before is not None and now is not None and now > before
    remembered.preemptions = now
    if rank.kv_used_ratio is not None and not rank.asleep:
        remembered.starved.add(mono, rank.kv_used_ratio >= STARVED_RATIO and ((waiting or 0) > 0 or preempted))
