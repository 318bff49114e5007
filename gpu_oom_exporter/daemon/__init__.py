"""The daemon: the tick, its schedule, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpu_oom_exporter.analysis import State, think
from gpu_oom_exporter.config import Config
from gpu_oom_exporter.daemon.watching import Watch, WatchSource
from gpu_oom_exporter.publish.archive import Archive
from gpu_oom_exporter.publish.exposition import Page
from gpu_oom_exporter.publish.web import Latest, Server, Site
from gpu_oom_exporter.simulate.host import FastClock, demo_config, demo_sources
from gpu_oom_exporter.sources.board import Board, Clock, Source
from gpu_oom_exporter.sources.containers import ContainerSource
from gpu_oom_exporter.sources.engines import EngineSource, Fetch, HttpFetch
from gpu_oom_exporter.sources.host import HostSource
from gpu_oom_exporter.sources.journal import Journal
from gpu_oom_exporter.sources.logs import KernelMessages, LogFiles, patterns_of
from gpu_oom_exporter.sources.nvml import NvmlSource
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
FROZEN_TICKS, FROZEN_SECONDS = 10, 30.0
"""The page turns 503 when the last tick is older than the longer of the two (`design.md` §3)."""


LATE_RATIO = 1.2
"""A tick is due when there was none for this many periods: NVML's readings are 0.9 to 1.1 apart."""

STOP_SECONDS = 1.2
"""How long a stop waits for the sources to let go."""


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
    docker_logs: str = "/var/lib/docker/containers"
    pod_logs: str = "/var/log/pods"
    kmsg: str = "/dev/kmsg"
    journals: tuple[str, ...] = ("/var/log/journal", "/run/log/journal")


@dataclass(frozen=True, slots=True)
class World:
    """What the daemon watches and by which clock: this host, or a simulated one."""

    sources: tuple[Source, ...]
    clock: Clock
    fetch: Fetch | None = None
    release_nvml: Callable[[], None] | None = None
    speed: float = 1.0
    """How fast the clock runs: the demo's may be sped up."""


def this_host(config: Config, paths: Paths, watch: bool = False) -> World:
    """The sources of this host; *watch* is for the daemon alone: it follows logs and writes the archive."""
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
    if watch and config.logs.enabled:
        sources.append(WatchSource(watch_of(config, paths, clock)))
    sources += [EngineSource(engine, fetch, clock, proc) for engine in config.engines]
    return World(tuple(sources), clock, fetch, release)


def watch_of(config: Config, paths: Paths, clock: Clock) -> Watch:
    """The watch over this host's logs."""
    logs = config.logs
    roots = (paths.docker_logs, paths.pod_logs) if logs.containers else ("", "")
    files = LogFiles(patterns_of(*roots, ((file.path, file.engine) for file in logs.files)))
    kernel = KernelMessages(paths.kmsg, f"{paths.procfs}/sys/kernel/random/boot_id") if logs.kernel else None
    journal = Journal(paths.journals) if logs.journal else None
    return Watch(files, kernel, Archive(f"{paths.storage}/incidents.sqlite"), clock, journal)


class Daemon:
    """Ticks over *world* and serves what it concludes.

    Reading and thinking have a thread and an event loop of their own: whatever blocks them, a hung file in /proc or
    a bug, the web server still answers, and answers 503 once the last tick is too old.
    """

    def __init__(self, world: World, config: Config, tick_seconds: float = TICK_SECONDS) -> None:
        self.world = world
        self.config = config
        self.clock = world.clock
        self.board = Board(world.sources, world.clock, on_reading=self.tick_safely)
        self.state = State()
        self.page = Page(config.limits.series)
        self.tick_seconds = tick_seconds
        self.complete = False
        self._ticked = self.clock.mono()
        self._failing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None

    def tick(self, lateness_seconds: float = 0.0) -> None:
        """Think once about the newest facts; awaits nothing."""
        snapshot = replace(self.board.snapshot(), tick_lateness_seconds=lateness_seconds)
        self.state = think(snapshot, self.state, self.config)
        self.complete = self.complete or snapshot.complete
        self._ticked = snapshot.mono

    def tick_safely(self) -> None:
        """Tick; one that fails is logged once and the next one tried."""
        try:
            self.tick(max(0.0, self.clock.mono() - self._ticked - self.tick_seconds))
        except Exception:
            if not self._failing:
                log.exception("tick failed")
            self._failing = True
        else:
            if self._failing:
                log.info("tick recovered")
            self._failing = False

    async def ticks(self) -> None:
        """Tick when no reading of NVML has done so: every reading ticks at once, so that no dip is missed."""
        while True:
            due = self._ticked + LATE_RATIO * self.tick_seconds
            if self.complete and not self._failing:
                await self.clock.sleep(max(0.05, due - self.clock.mono()))
                if self.clock.mono() < self._ticked + LATE_RATIO * self.tick_seconds:
                    continue
            else:  # the first page as soon as there is one
                await self.clock.sleep(0.1 * self.tick_seconds)
            self.tick_safely()

    def latest(self) -> Latest:
        """The newest report, for the web pages."""
        limit = max(FROZEN_TICKS * self.tick_seconds, FROZEN_SECONDS) * max(1.0, self.world.speed)
        age = self.clock.mono() - self._ticked
        return Latest(self.state.report if self.complete else None, age, limit)

    def release_nvml(self) -> None:
        """Let go of the driver (SIGUSR1); safe to call from any thread."""
        if self._loop is not None and self.world.release_nvml is not None:
            self._loop.call_soon_threadsafe(self.world.release_nvml)
        else:
            log.info("there is no NVML to release")

    async def run(self, addresses: Sequence[str], telemetry_path: str, started: Callable[[Server], None]) -> None:
        """Listen, read, tick and serve until cancelled. Raises `ListenError` before anything else is started."""
        site = Site(self.latest, self.page, telemetry_path)
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        async with Server(site, tuple(addresses)) as server:
            threading.Thread(
                target=self._read_and_think,
                args=(asyncio.get_running_loop(), ended),
                name="read and think",
                daemon=True,
            ).start()
            started(server)
            try:
                error = await asyncio.shield(ended)
                if error is not None:
                    raise error
            finally:
                if self._loop is not None and self._work is not None and not ended.done():
                    self._loop.call_soon_threadsafe(self._work.cancel)
                    await asyncio.wait({ended}, timeout=STOP_SECONDS)

    def _read_and_think(self, web: asyncio.AbstractEventLoop, ended: asyncio.Future[BaseException | None]) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._until_cancelled())
        except asyncio.CancelledError:
            pass
        except BaseException as err:  # noqa: BLE001 - raised again in the web loop
            error = err
        with contextlib.suppress(RuntimeError):  # the web loop is closed: nobody waits any more
            web.call_soon_threadsafe(_settle, ended, error)

    async def _until_cancelled(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.board.run(), name="board")
                group.create_task(self.ticks(), name="ticks")
        finally:
            if self.world.fetch is not None:
                await self.world.fetch.close()


def _settle(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)


def simulated_host(speed: float) -> tuple[World, Config]:
    """The demo: a simulated host whose time runs *speed* times as fast, and the configuration that fits it."""
    clock = FastClock(SystemClock(), speed)
    sources, fetch = demo_sources(clock)
    return World(sources, clock, fetch, speed=speed), demo_config()
