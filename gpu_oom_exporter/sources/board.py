"""The board: runs every source on its own period and deadline, and holds its newest facts and health.

A source that fails, hangs or is late costs its own facts and nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from gpu_oom_exporter.model import ContainerFacts, EngineFacts, Health, HostFacts, LogFacts, NvmlFacts, Reason, Snapshot

log = logging.getLogger(__name__)
Facts: TypeAlias = NvmlFacts | HostFacts | EngineFacts | ContainerFacts | LogFacts


class SourceError(Exception):
    """A source has no facts this time: a `reason` from a closed set and a sentence for the log."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Clock(Protocol):
    """Time as an argument: `time` is unix seconds, `mono` is monotonic; `sleep` passes on the same scale."""

    def time(self) -> float:
        """Unix seconds."""

    def mono(self) -> float:
        """Monotonic seconds."""

    async def sleep(self, seconds: float) -> None:
        """Let *seconds* of this clock pass."""


class Source(Protocol):
    """What the board runs. `name` is the `source` label; `key` tells several of one name apart."""

    name: str
    key: str
    timeout_seconds: float
    stale_seconds: float

    @property
    def period_seconds(self) -> float:
        """Seconds between the starts of two reads; may change with what was read."""

    async def read(self) -> Facts:
        """Read once, or raise `SourceError`."""

    async def close(self) -> None:
        """Let go of everything, in well under a second."""


@dataclass(slots=True)
class _Posted:
    """What one source said last."""

    facts: Facts | None = None
    mono: float = float("-inf")
    health: Health | None = None
    failures: dict[str, int] = field(default_factory=dict)
    failing_since: float | None = None
    reason: Reason | None = None


class Board:
    """Holds the newest facts of *sources*; `run` keeps them new, `snapshot` reads without waiting.

    *on_reading* is called after each reading of NVML, so that none is missed, and when the logs tell something new.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        clock: Clock,
        jitter: Callable[[float, float], float] = random.uniform,
        on_reading: Callable[[], None] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.clock = clock
        self.jitter = jitter
        self.on_reading = on_reading
        self._posted = {(s.name, s.key): _Posted() for s in self.sources}

    async def run(self) -> None:
        """Run every source until cancelled, then close them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for source in self.sources:
                    group.create_task(self._loop(source), name=f"source {source.name} {source.key}")
        finally:
            await asyncio.gather(*(s.close() for s in self.sources), return_exceptions=True)

    async def _loop(self, source: Source) -> None:
        while True:
            began = self.clock.mono()
            await self.read_once(source)
            # jitter keeps a fleet from reading in step
            period = source.period_seconds * self.jitter(0.9, 1.1)
            await self.clock.sleep(max(0.0, began + period - self.clock.mono()))

    async def read_once(self, source: Source) -> None:
        """Read *source* and post what came of it; never raises for what the source did."""
        began = self.clock.mono()
        try:
            async with asyncio.timeout(source.timeout_seconds):
                facts = await source.read()
        except TimeoutError:
            self._fail(source, began, Reason.TIMEOUT, f"no answer within {source.timeout_seconds:g} s")
        except SourceError as err:
            self._fail(source, began, err.reason, err.detail)
        except Exception:  # noqa: BLE001 - logged with its traceback by `_fail`
            # a bug in one source must not end the others
            self._fail(source, began, Reason.INTERNAL, "see the traceback in the log")
        else:
            self._post(source, began, facts)

    def _post(self, source: Source, began: float, facts: Facts) -> None:
        posted = self._posted[source.name, source.key]
        now = self.clock.mono()
        for why, count in getattr(facts, "rejected", {}).items():
            posted.failures[f"insane_{why}"] = posted.failures.get(f"insane_{why}", 0) + count
        if posted.failing_since is not None:
            log.info(
                "source recovered",
                extra={
                    "source": source.name,
                    "key": source.key,
                    "after_seconds": round(now - posted.failing_since, 1),
                },
            )
        posted.failing_since = posted.reason = None
        news = isinstance(facts, NvmlFacts) or (isinstance(facts, LogFacts) and facts != posted.facts)
        posted.facts, posted.mono = facts, now
        posted.health = Health(True, now - began, None, "", self.clock.time(), dict(posted.failures))
        if self.on_reading is not None and news:
            self.on_reading()

    def _fail(self, source: Source, began: float, reason: Reason, detail: str) -> None:
        posted = self._posted[source.name, source.key]
        now = self.clock.mono()
        posted.failures[reason] = posted.failures.get(reason, 0) + 1
        if posted.reason is not reason:
            posted.failing_since = now if posted.failing_since is None else posted.failing_since
            posted.reason = reason
            log.warning(
                "source failed",
                extra={"source": source.name, "key": source.key, "reason": str(reason), "detail": detail},
                exc_info=reason is Reason.INTERNAL,
            )
        last = posted.health.last_success_time if posted.health else None
        posted.facts = None
        posted.health = Health(False, now - began, reason, detail, last, dict(posted.failures))

    def snapshot(self) -> Snapshot:
        """The newest facts of every source; those older than the source allows are dropped."""
        now = self.clock.mono()
        fresh: dict[type, list[Any]] = {NvmlFacts: [], HostFacts: [], EngineFacts: [], ContainerFacts: [], LogFacts: []}
        health: dict[str, Health] = {}
        complete = True
        for source in self.sources:
            posted = self._posted[source.name, source.key]
            if posted.health is None:
                complete = False
                continue
            own = posted.health
            if posted.facts is not None:
                if now - posted.mono <= source.stale_seconds:
                    fresh[type(posted.facts)].append(posted.facts)
                else:
                    own = replace(own, ok=False, reason=Reason.STALE, detail="the newest facts are too old")
            health[source.name] = _joined(health.get(source.name), own)
        return Snapshot(
            time=self.clock.time(),
            mono=now,
            health=health,
            nvml=next(iter(fresh[NvmlFacts]), None),
            host=next(iter(fresh[HostFacts]), None),
            engines=tuple(fresh[EngineFacts]),
            containers=next(iter(fresh[ContainerFacts]), None),
            logs=next(iter(fresh[LogFacts]), None),
            complete=complete,
        )


def _joined(one: Health | None, other: Health) -> Health:
    """The health of several sources of one name: as bad as the worst, as slow as the slowest."""
    if one is None:
        return other
    failures = dict(one.failures)
    for why, count in other.failures.items():
        failures[why] = failures.get(why, 0) + count
    worst = one if not one.ok else other
    times = [t for t in (one.last_success_time, other.last_success_time) if t is not None]
    return Health(
        one.ok and other.ok,
        max(one.seconds, other.seconds),
        worst.reason,
        worst.detail,
        min(times, default=None),
        failures,
    )
