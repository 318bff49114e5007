"""The board: a source's failure costs its own facts; freshness, health and log lines."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gpu_oom_exporter.model import Answer, EngineFacts, HostFacts, Reason
from gpu_oom_exporter.sources.board import Board, SourceError
from tests.conftest import ManualClock


class Scripted:
    """A source that does what its script says, one step a read."""

    stale_seconds = 10.0
    period_seconds = 1.0

    def __init__(self, *script: object, name: str = "host", key: str = "", timeout: float = 5.0) -> None:
        self.script = list(script)
        self.name = name
        self.key = key
        self.timeout_seconds = timeout
        self.closed = False

    async def read(self) -> HostFacts:
        step = self.script.pop(0) if self.script else HostFacts()
        if isinstance(step, Exception):
            raise step
        if step == "hang":
            await asyncio.sleep(3600)
        assert isinstance(step, HostFacts | EngineFacts)
        return step  # type: ignore[return-value]

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason(clock: ManualClock, reason: Reason) -> None:
    """A source that raises any reason has no facts, and its health says why."""
    source = Scripted(SourceError(reason, "because"))
    board = Board([source], clock)
    await board.read_once(source)
    snapshot = board.snapshot()
    assert snapshot.host is None
    health = snapshot.health["host"]
    assert (health.ok, health.reason, health.detail, health.failures) == (False, reason, "because", {reason: 1})


async def test_a_source_that_hangs(clock: ManualClock) -> None:
    """A read past its timeout is a failure of that source alone."""
    hung, well = Scripted("hang", timeout=0.05), Scripted(HostFacts(1), name="other")
    board = Board([hung, well], clock)
    await board.read_once(hung)
    await board.read_once(well)
    snapshot = board.snapshot()
    assert snapshot.health["host"].reason is Reason.TIMEOUT
    assert snapshot.host == HostFacts(1)


async def test_a_bug_in_a_source(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """Any exception is the source's failure, logged with its traceback."""
    source = Scripted(ZeroDivisionError("oops"))
    board = Board([source], clock)
    await board.read_once(source)
    assert board.snapshot().health["host"].reason is Reason.INTERNAL
    assert "ZeroDivisionError" in caplog.text


async def test_stale_facts_are_dropped(clock: ManualClock) -> None:
    """The last good value is not shown for ever."""
    source = Scripted(HostFacts(1))
    board = Board([source], clock)
    await board.read_once(source)
    clock.advance(10.0)
    assert board.snapshot().host == HostFacts(1)
    clock.advance(0.1)
    snapshot = board.snapshot()
    assert snapshot.host is None
    assert snapshot.health["host"].reason is Reason.STALE
    assert not snapshot.health["host"].ok


async def test_complete_when_all_have_been_read(clock: ManualClock) -> None:
    """The first page waits for every source's first answer, or failure."""
    one, two = Scripted(), Scripted(SourceError(Reason.NO_DRIVER, ""), name="nvml")
    board = Board([one, two], clock)
    assert not board.snapshot().complete
    await board.read_once(one)
    assert not board.snapshot().complete
    await board.read_once(two)
    assert board.snapshot().complete


async def test_failures_are_logged_when_they_begin_and_end(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when it begins, one when the reason changes, one when it ends; not one a read."""
    caplog.set_level(logging.INFO)
    no_driver = SourceError(Reason.NO_DRIVER, "")
    source = Scripted(no_driver, no_driver, no_driver, SourceError(Reason.STUCK, ""), HostFacts(), HostFacts())
    board = Board([source], clock)
    for _ in range(6):
        await board.read_once(source)
        clock.advance(1.0)
    assert [r.getMessage() for r in caplog.records] == ["source failed", "source failed", "source recovered"]
    assert vars(caplog.records[-1])["after_seconds"] == 4.0
    assert board.snapshot().health["host"].failures == {"no_driver": 3, "stuck": 1}


async def test_several_sources_of_one_name(clock: ManualClock) -> None:
    """Engines share one health: up only when each is, and every engine's facts are there."""
    answer = EngineFacts("a", "vllm", "http://a", Answer.OK)
    good = Scripted(answer, name="engines", key="a")
    bad = Scripted(SourceError(Reason.NO_PERMISSION, "token"), name="engines", key="b")
    board = Board([good, bad], clock)
    await board.read_once(good)
    await board.read_once(bad)
    snapshot = board.snapshot()
    assert snapshot.engines == (answer,)
    assert not snapshot.health["engines"].ok
    assert snapshot.health["engines"].failures == {"no_permission": 1}


async def test_run_reads_on_each_period_and_closes(clock: ManualClock) -> None:
    """Each source has its own loop; cancelling closes them all."""
    source = Scripted(*[HostFacts(n) for n in range(100)])
    board = Board([source], clock, jitter=lambda low, high: 1.0)
    task = asyncio.create_task(board.run())
    for expected in range(3):
        for _ in range(5):
            await asyncio.sleep(0)
        assert board.snapshot().host == HostFacts(expected)
        clock.advance(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


def test_jitter_is_a_tenth(clock: ManualClock) -> None:
    """A fleet must not read in step; ±10 % of the period."""
    seen = []
    board = Board([], clock, jitter=lambda low, high: seen.append((low, high)) or 1.0)

    async def one_round() -> None:
        source = Scripted()
        board._posted[source.name, source.key] = type(next(iter(Board([source], clock)._posted.values())))()
        task = asyncio.create_task(board._loop(source))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(one_round())
    assert seen == [(0.9, 1.1)]
