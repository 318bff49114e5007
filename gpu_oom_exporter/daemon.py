"""The daemon: the tick, its schedule, start and stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpu_oom_exporter.analysis import State, think
from gpu_oom_exporter.config import Config
from gpu_oom_exporter.publish.exposition import Page
from gpu_oom_exporter.publish.web import Latest, Server, Site
from gpu_oom_exporter.simulate.host import FastClock, demo_config, demo_sources
from gpu_oom_exporter.sources.board import Board, Clock, Source
from gpu_oom_exporter.sources.containers import ContainerSource
from gpu_oom_exporter.sources.engines import EngineSource, Fetch, HttpFetch
from gpu_oom_exporter.sources.host import HostSource
from gpu_oom_exporter.sources.nvml import NvmlSource
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
FROZEN_TICKS, FROZEN_SECONDS = 10, 30.0
"""The page turns 503 when the last tick is older than the longer of the two (`design.md` §3)."""


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()  # noqa: TID251 - this is the one place that asks

    def mono(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()  # noqa: TID251 - this is the one place that asks

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Paths:
    """Roots that are parameters: /proc, /sys, and the folder for what must survive a restart."""

    procfs: str = "/proc"
    sysfs: str = "/sys"
    storage: str = "/var/lib/gpu-oom-exporter"
    docker_socket: str = "/var/run/docker.sock"
    container_logs: str = "/var/log/containers"


@dataclass(frozen=True, slots=True)
class World:
    """What the daemon watches and by which clock: this host, or a simulated one."""

    sources: tuple[Source, ...]
    clock: Clock
    fetch: Fetch | None = None
    release_nvml: Callable[[], None] | None = None


def this_host(config: Config, paths: Paths) -> World:
    """The sources of this host."""
    clock = SystemClock()
    proc = ProcReader(paths.procfs, cgroupfs=f"{paths.sysfs}/fs/cgroup")
    fetch = HttpFetch()
    sources: list[Source] = [
        HostSource(paths.procfs, paths.sysfs),
        ContainerSource(paths.docker_socket, paths.container_logs),
    ]
    release = None
    if config.nvml.enabled:
        nvml = NvmlSource(
            clock,
            proc,
            paths.storage,
            sysfs=paths.sysfs,
            period_seconds=config.nvml.period_seconds,
            deadline_seconds=config.nvml.deadline_seconds,
        )
        sources.insert(0, nvml)
        release = nvml.release
    sources += [EngineSource(engine, fetch, clock, proc) for engine in config.engines]
    return World(tuple(sources), clock, fetch, release)


class Daemon:
    """Ticks over *world* and serves what it concludes."""

    def __init__(self, world: World, config: Config, tick_seconds: float = TICK_SECONDS) -> None:
        self.world = world
        self.config = config
        self.clock = world.clock
        self.board = Board(world.sources, world.clock)
        self.state = State()
        self.page = Page(config.limits.series)
        self.tick_seconds = tick_seconds
        self.complete = False
        self._ticked = self.clock.mono()
        self._failing = False

    def tick(self, lateness_seconds: float = 0.0) -> None:
        """Think once about the newest facts; awaits nothing."""
        snapshot = replace(self.board.snapshot(), tick_lateness_seconds=lateness_seconds)
        self.state = think(snapshot, self.state, self.config)
        self.complete = self.complete or snapshot.complete
        self._ticked = snapshot.mono

    def latest(self) -> Latest:
        """The newest report, for the web pages."""
        limit = max(FROZEN_TICKS * self.tick_seconds, FROZEN_SECONDS)
        age = self.clock.mono() - self._ticked
        return Latest(self.state.report if self.complete else None, age, limit)

    async def ticks(self) -> None:
        """Tick on schedule until cancelled; a tick that fails is logged once and the next one tried."""
        due = self.clock.mono()
        while True:
            lateness = max(0.0, self.clock.mono() - due)
            try:
                self.tick(lateness)
            except Exception:
                if not self._failing:
                    log.exception("tick failed")
                self._failing = True
            else:
                if self._failing:
                    log.info("tick recovered")
                self._failing = False
            now = self.clock.mono()
            due += self.tick_seconds
            if due <= now:  # after a pause of the machine: go on from here, do not catch up
                due = now + self.tick_seconds
            if not self.complete:  # the first page as soon as there is one
                await self.clock.sleep(min(0.1, due - now))
                due = min(due, self.clock.mono())
            else:
                await self.clock.sleep(due - now)

    async def run(self, addresses: Sequence[str], telemetry_path: str, started: Callable[[Server], None]) -> None:
        """Listen, read, tick and serve until cancelled. Raises `ListenError` before anything else is started."""
        site = Site(self.latest, self.page, telemetry_path)
        try:
            async with Server(site, tuple(addresses)) as server, asyncio.TaskGroup() as group:
                group.create_task(self.board.run(), name="board")
                group.create_task(self.ticks(), name="ticks")
                started(server)
        finally:
            if self.world.fetch is not None:
                await self.world.fetch.close()


def simulated_host(speed: float) -> tuple[World, Config]:
    """The demo: a simulated host whose time runs *speed* times as fast, and the configuration that fits it."""
    clock = FastClock(SystemClock(), speed)
    sources, fetch = demo_sources(clock)
    return World(sources, clock, fetch), demo_config()
