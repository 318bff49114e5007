"""Carry out a plan: end one process, by a handle that cannot come to mean another, and measure what it freed.

Identity is a pidfd together with start time, cgroup and presence on the GPU, verified right before each signal.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpu_oom_exporter.analysis.releasing import Plan
from gpu_oom_exporter.model import Place, Report
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

KILL_SECONDS = 10.0
SETTLE_SECONDS = 15.0
"""Freeing 80 GB takes the driver more than 5 s."""

SETTLED_READINGS = 3
POLL_SECONDS = 0.5

Measure = Callable[[], Awaitable[Report | None]]


class Changed(Exception):
    """What was to be signalled is not what was planned any more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan. `ended` says whether the target is gone; None for unknown memory."""

    ended: bool
    freed_bytes: int | None
    log: tuple[str, ...]


async def carry_out(plan: Plan, measure: Measure, proc: ProcReader, grace_seconds: float) -> Outcome:
    """End the plan's target and measure. Raises `Changed` when it is not the same process any more."""
    log: list[str] = []
    before = _used(await measure(), plan.places)
    try:
        handle = os.pidfd_open(plan.target)
    except ProcessLookupError:
        raise Changed(f"PID {plan.target} has ended by itself") from None
    try:
        ended = False
        for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
            await _verify(plan, measure, proc)
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                ended = True
                break
            log.append(f"sent {number.name} to PID {plan.target}")
            if await _ends(handle, seconds):
                ended = True
                break
            log.append(f"PID {plan.target} is still there after {seconds:g} s")
    finally:
        os.close(handle)
    after = await _settled(measure, plan.places)
    freed = None if before is None or after is None else max(0, before - after)
    return Outcome(ended, freed, tuple(log))


async def _verify(plan: Plan, measure: Measure, proc: ProcReader) -> None:
    """The handle is ours; that it is still what was planned is verified by everything else that is known."""
    stat = proc.stat(plan.target)
    if stat is None:
        raise Changed(f"PID {plan.target} has ended by itself")
    if stat[3] != plan.start_ticks:
        raise Changed(f"PID {plan.target} is another process now; nothing was sent to it")
    process = proc.look(plan.target, 0.0)
    if process is not None and process.cgroup != plan.cgroup:
        raise Changed(f"PID {plan.target} has moved to another cgroup; look at it again")
    report = await measure()
    if report is None or not report.ownership:
        raise Changed("the GPU cannot be read any more, so nothing can be verified")
    held = {h.pid for place in plan.places if place in report.ownership for h in report.ownership[place].holdings}
    if plan.pid not in held:
        raise Changed(f"PID {plan.pid} does not hold memory of that GPU any more")


async def _ends(handle: int, seconds: float) -> bool:
    """Whether the process behind *handle* ends within *seconds*."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        if select.select([handle], [], [], 0)[0]:
            return True
        if loop.time() >= end:
            return False
        await asyncio.sleep(min(0.05, max(0.0, end - loop.time())))


async def _settled(measure: Measure, places: tuple[Place, ...]) -> int | None:
    """Used bytes of *places* once three readings in a row agree, or the last ones after a while."""
    loop = asyncio.get_running_loop()
    end = loop.time() + SETTLE_SECONDS
    last: int | None = None
    same = 0
    while same < SETTLED_READINGS and loop.time() < end:
        used = _used(await measure(), places)
        same = same + 1 if used == last and used is not None else 1
        last = used
        await asyncio.sleep(POLL_SECONDS)
    return last


def _used(report: Report | None, places: tuple[Place, ...]) -> int | None:
    if report is None:
        return None
    used = [report.headroom[place].used_bytes for place in places if place in report.headroom]
    return None if len(used) < len(places) or None in used else sum(u for u in used if u is not None)
