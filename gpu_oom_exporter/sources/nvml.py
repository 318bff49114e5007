"""Devices, memory, processes and Xids: the parent's side of the NVML reader.

The driver is spoken to by `nvml_reader` in a process of its own, judged here by its clock. A call that hangs
in the kernel then holds neither the port, nor the scrape, nor the next start. A reader that will not die is
never given a sibling: this daemon remembers it, and so does the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gpu_oom_exporter.model import (
    Gap,
    Gpu,
    GpuInstance,
    GpuProcess,
    Memory,
    MemoryKind,
    NvmlFacts,
    Process,
    Reason,
    XidCount,
)
from gpu_oom_exporter.sources.board import Clock, SourceError
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 8.0
"""A reading that takes longer is stuck: a cold driver without persistence needs up to about 5 s for nvmlInit."""

BACK_OFF_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Waits between reader starts. A host without a driver costs one short process a minute."""

LOST_AGAIN_SECONDS = 300.0
"""While a GPU is lost, NVML is started anew this often: only a new nvmlInit sees a GPU that came back."""

END_SECONDS = 2.0
"""A reader that was asked to end has this long for nvmlShutdown; then it is killed."""

NEW_GPU_SECONDS = 10.0
"""A GPU that appears on the bus has this long to be ready before NVML is started anew for it."""

LINE_BYTES = 4 * 1024 * 1024
"""A reading of 16 GPUs with 5,000 processes is under 1 MiB."""


class Link(Protocol):
    """One life of NVML: the reader process, or the simulated host."""

    async def ask(self) -> Mapping[str, Any] | None:
        """One reading in the reader's words; None when the reader has ended."""

    def gone(self) -> bool:
        """Whether the reader has ended and been reaped."""

    def stop(self, force: bool) -> None:
        """Ask the reader to end, or kill it; never waits."""


class ReaderProcess:
    """The exec'd `nvml_reader`, over a pair of pipes. *kill* is injected by a test of what cannot be killed."""

    def __init__(self, sysfs: str = "/sys", kill: Callable[[subprocess.Popen[bytes]], None] | None = None) -> None:
        # -P: the working directory must not be able to shadow a module
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu_oom_exporter.sources.nvml_reader", sysfs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=True,
        )
        self._kill = kill or subprocess.Popen.kill
        self._lines: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def ask(self) -> Mapping[str, Any] | None:
        """One reading; the caller sets the deadline."""
        assert self.child.stdin is not None
        if self._lines is None:
            self._lines = asyncio.StreamReader(limit=LINE_BYTES)
            protocol = asyncio.StreamReaderProtocol(self._lines)
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self.child.stdout)
        try:
            os.write(self.child.stdin.fileno(), b"read\n")
            line = await self._lines.readline()
            return dict(json.loads(line)) if line else None
        except (BrokenPipeError, ConnectionResetError):
            return None
        except (ValueError, TypeError) as err:  # no JSON, no object, or a line beyond the limit
            raise SourceError(Reason.READER_FAILED, f"the reader's answer cannot be read: {err}") from err

    def gone(self) -> bool:
        """Whether the reader has ended and been reaped."""
        if self.child.poll() is None:
            return False
        self._hang_up()
        return True

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()
        elif self.child.stdout is not None:
            self.child.stdout.close()

    def stop(self, force: bool) -> None:
        """Close the reader's input, which ends it after nvmlShutdown; with *force*, kill it as well."""
        if self.child.stdin is not None and not self.child.stdin.closed:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
        if force and not self.gone():
            self._hang_up()
            self._kill(self.child)


class ReaderMemory:
    """Remembers readers on disk, so that the next daemon knows of one that this daemon could not end."""

    def __init__(self, folder: str, proc: ProcReader) -> None:
        self.folder = folder
        self.proc = proc
        self._path: str | None = None

    def remember(self, pid: int) -> None:
        """Note the reader *pid* and its daemon, us, each by PID and start time."""
        mine, its = self.proc.stat(os.getpid()), self.proc.stat(pid)
        if mine is None or its is None:
            return
        self._path = f"{self.folder}/nvml-reader-{pid}"
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with open(self._path, "w", encoding="ascii") as file:
                file.write(f"{pid} {its[3]} {os.getpid()} {mine[3]}\n")
        except OSError as err:
            self.forget()
            log.warning("reader not remembered", extra={"path": self.folder, "detail": str(err)})

    def forget(self) -> None:
        """The reader we noted has ended."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = None

    def leftover(self) -> int | None:
        """PID of a reader whose daemon is gone while it lives on; notes of dead readers are removed."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return None
        for name in names:
            if not name.startswith("nvml-reader-"):
                continue
            path = f"{self.folder}/{name}"
            words = _note(path)
            if words is None:
                continue
            pid, start, parent, parent_start = words
            if not self._lives(pid, start):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif not self._lives(parent, parent_start):
                return pid
        return None

    def _lives(self, pid: int, start: int) -> bool:
        stat = self.proc.stat(pid)
        return stat is not None and stat[3] == start and stat[1] not in "ZX"


def _note(path: str) -> tuple[int, int, int, int] | None:
    """The four numbers of a note; one that makes no sense (a full disk) is removed, one that is no file is left."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        pid, start, parent, parent_start = (int(word) for word in os.read(file, 256).split())
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    finally:
        os.close(file)
    return pid, start, parent, parent_start


class NvmlSource:
    """NVML and the /proc of the PIDs it named, as one source."""

    name = "nvml"
    key = ""

    def __init__(
        self,
        clock: Clock,
        proc: ProcReader,
        storage: str,
        start: Callable[[], Link] | None = None,
        sysfs: str = "/sys",
        period_seconds: float = 1.0,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.clock = clock
        self.proc = proc
        self.period_seconds = period_seconds
        self.deadline_seconds = deadline_seconds
        self.timeout_seconds = deadline_seconds + 2.0
        self.stale_seconds = deadline_seconds + 2.0 * period_seconds  # a slow answer is no reason to blink
        self.marker = f"{storage}/release-nvml"
        self.memory = ReaderMemory(storage, proc)
        self._start = start or (lambda: ReaderProcess(sysfs))
        self._link: Link | None = None
        self._ending = False
        self._released = False
        self._tries = 0
        self._not_before = float("-inf")
        self._last_error: SourceError | None = None
        self._again_at = float("inf")
        self._missing = 2**31  # so that the first reading's missing GPUs are no news
        self._ending_since = float("inf")
        self._xids: dict[tuple[str, int], int] = {}
        self._wsl = proc.wsl()
        self._down: set[str] = set()
        self._answers: dict[int, tuple[Mapping[str, Any], Gpu]] = {}

    def release(self) -> None:
        """Let go of the driver until the marker file is removed (SIGUSR1)."""
        self._released = True
        try:
            os.makedirs(os.path.dirname(self.marker), mode=0o700, exist_ok=True)
            with open(self.marker, "a", encoding="ascii"):
                pass
            log.info("NVML released", extra={"until_removed": self.marker})
            self._released = False  # from here on the file says it
        except OSError as err:
            log.warning("NVML released until restart", extra={"path": self.marker, "detail": str(err)})
        self._end(force=False)

    async def read(self) -> NvmlFacts:
        """One reading, or `SourceError` with the reason why there is none."""
        if self._ending and self.clock.mono() - self._ending_since > END_SECONDS:
            self._end(force=True)  # nvmlShutdown hangs
        if self._released or os.path.exists(self.marker):
            self._end(force=False)
            self._reap()
            until = "until the daemon is restarted" if self._released else f"while {self.marker} exists"
            raise SourceError(Reason.RELEASED, f"NVML is released {until}")
        self._reap()
        if self._link is not None and self._ending:
            raise SourceError(Reason.STUCK, "the reader does not end; the driver holds it. No second one is started")
        if self._link is None:
            self._begin()
        elif self.clock.mono() > self._again_at:
            self._again_at = float("inf")  # once; `_facts` sets it again while a GPU is lost
            await self._replace()
        link = self._link
        if link is None or self._ending:
            raise SourceError(Reason.STUCK, "the reader does not end, so it cannot be replaced")
        try:
            async with asyncio.timeout(self.deadline_seconds):
                reply = await link.ask()
            facts = self._judged(reply)
        except TimeoutError:
            problem = SourceError(Reason.STUCK, f"the driver has not answered for {self.deadline_seconds:g} s")
        except SourceError as err:
            problem = err
        except BaseException:
            # cancelled between question and answer: the next answer would be taken for the next question's
            self._end(force=True)
            raise
        else:
            self._tries = 0
            return facts
        if problem.reason is not Reason.SUSPENDED:  # then the reader waits and has not touched the driver
            self._back_off(problem)
            self._end(force=True)
            self._reap()
        raise problem

    def _judged(self, reply: Mapping[str, Any] | None) -> NvmlFacts:
        """The facts in the reader's *reply*, or why there are none."""
        if reply is None:
            raise SourceError(Reason.READER_FAILED, "the NVML reader ended without an answer")
        if "reason" in reply:
            raise SourceError(_reason(reply["reason"]), str(reply.get("detail", "")))
        try:
            return self._facts(reply)
        except (KeyError, TypeError, ValueError, IndexError) as err:
            raise SourceError(Reason.READER_FAILED, f"the reader's answer makes no sense: {err!r}") from err

    async def close(self) -> None:
        """End the reader; wait a moment for a clean end, never for a stuck one."""
        for force, polls in ((False, 20), (True, 10)):
            self._end(force)
            for _ in range(polls):
                self._reap()
                if self._link is None:
                    return
                await asyncio.sleep(0.02)

    async def _replace(self) -> None:
        """Start NVML anew without a gap in the facts: a reader that is well ends in milliseconds."""
        self._end(force=False)
        for _ in range(100):
            self._reap()
            if self._link is None:
                self._begin()
                return
            await asyncio.sleep(0.01)

    def _begin(self) -> None:
        now = self.clock.mono()
        if now < self._not_before and self._last_error is not None:
            raise SourceError(self._last_error.reason, self._last_error.detail)
        leftover = self.memory.leftover()
        if leftover is not None:
            raise SourceError(Reason.STUCK, f"the reader {leftover} of an earlier daemon does not end")
        try:
            self._link = self._start()
        except OSError as err:
            self._back_off(error := SourceError(Reason.READER_FAILED, f"the reader does not start: {err}"))
            raise error from err
        self._ending = False
        self._again_at = float("inf")
        if isinstance(self._link, ReaderProcess):
            self.memory.remember(self._link.child.pid)

    def _back_off(self, error: SourceError) -> None:
        self._last_error = error
        self._not_before = self.clock.mono() + BACK_OFF_SECONDS[min(self._tries, len(BACK_OFF_SECONDS) - 1)]
        self._tries += 1

    def _end(self, force: bool) -> None:
        if self._link is not None:
            if not self._ending:
                self._ending_since = self.clock.mono()
            self._ending = True
            self._link.stop(force)

    def _reap(self) -> None:
        if self._link is not None and self._ending and self._link.gone():
            self._link = None
            self._ending = False
            self.memory.forget()

    def _facts(self, reply: Mapping[str, Any]) -> NvmlFacts:
        for uuid, xid in reply["xids"]:
            self._xids[str(uuid), int(xid)] = self._xids.get((str(uuid), int(xid)), 0) + 1
        host_pids = self.proc.host_pids()
        gpus = tuple(self._gpu_of(gpu) for gpu in reply["gpus"])
        self._tell(gpus)
        missing, now = int(reply.get("missing", 0)), self.clock.mono()
        if missing > self._missing:  # a GPU that came to the bus: NVML sees it only when it is started anew
            self._again_at = min(self._again_at, now + NEW_GPU_SECONDS)
        elif missing or any(gpu.up is False for gpu in gpus):
            self._again_at = min(self._again_at, now + LOST_AGAIN_SECONDS)
        else:
            self._again_at = float("inf")
        self._missing = missing
        processes: dict[int, Process] = {}
        dead: frozenset[int] = frozenset()
        if host_pids:
            pids = {p.pid for g in gpus for p in g.processes or ()}
            pids |= {p.pid for g in gpus for i in g.instances for p in i.processes or ()}
            processes = self.proc.families(sorted(pids), self.clock.mono())
            dead = frozenset(pid for pid in pids - processes.keys() if not self.proc.exists(pid))
        xids = tuple(XidCount(uuid, xid, count) for (uuid, xid), count in self._xids.items())
        return NvmlFacts(str(reply["driver"]), gpus, processes, host_pids, xids, reply["rejected"], dead)

    def _tell(self, gpus: tuple[Gpu, ...]) -> None:
        """Log when a GPU goes down and when it is back."""
        down = {gpu.uuid or str(gpu.index): gpu for gpu in gpus if gpu.up is False}
        for name in down.keys() - self._down:
            log.warning("GPU down", extra={"gpu": down[name].index, "UUID": name, "detail": down[name].detail})
        for name in self._down - down.keys():
            log.info("GPU no longer down", extra={"UUID": name})
        self._down = set(down)

    def _gpu_of(self, raw: Mapping[str, Any]) -> Gpu:
        """The facts about one GPU; one whose answer is the same as before is not taken apart again."""
        before = self._answers.get(raw["index"])
        if before is None or before[0] != raw:
            before = self._answers[raw["index"]] = (raw, _gpu(raw, self._wsl))
        return before[1]


def _reason(word: str) -> Reason:
    try:
        return Reason(word)
    except ValueError:
        return Reason.READER_FAILED


DETAILS = {"lost": "the GPU is lost; it needs a reset", "gone": "the driver does not answer for this GPU"}


def _gpu(raw: Mapping[str, Any], wsl: bool) -> Gpu:
    up = raw.get("up")
    gaps = {Gap(gap) for gap in raw.get("gaps", ())}
    if wsl:
        gaps.add(Gap.WDDM)
    elif any(process[2] is None for process in raw.get("processes") or ()):
        gaps.add(Gap.NOT_SUPPORTED)
    code = str(raw.get("code", ""))
    if code == "no_permission":
        gaps.add(Gap.NO_PERMISSION)
    if raw.get("vgpu"):
        gaps.add(Gap.VGPU)
    percent = raw.get("gpu_percent")
    return Gpu(
        index=raw["index"],
        uuid=str(raw["uuid"]),
        pci_bus_id=str(raw["bus"]),
        name=str(raw["name"]),
        minor=raw["minor"],
        up=up,
        detail=DETAILS.get(code, code),
        memory=_memory(raw.get("memory")),
        memory_kind=MemoryKind(raw.get("kind", "unknown")),
        gpu_ratio=None if percent is None else percent / 100,
        processes=_processes(raw.get("processes")),
        mig=bool(raw.get("mig")),
        instances=tuple(
            GpuInstance(
                int(i["id"]),
                str(i["profile"]),
                _memory(i["memory"]),
                _processes(i["processes"]),
                frozenset(Gap(gap) for gap in i["gaps"])
                | ({Gap.NOT_SUPPORTED} if any(p[2] is None for p in i["processes"] or ()) else frozenset()),
                MemoryKind(i.get("kind", "unknown")),
            )
            for i in raw.get("instances", ())
        ),
        gaps=frozenset(gaps),
        recovery_action=raw.get("recovery"),
    )


def _memory(raw: list[int] | None) -> Memory | None:
    return None if raw is None else Memory(raw[0], raw[1], raw[2], raw[3])


def _processes(raw: list[list[Any]] | None) -> tuple[GpuProcess, ...] | None:
    if raw is None:
        return None
    return tuple(GpuProcess(p[0], p[1], p[2], None if p[3] is None else p[3] / 100) for p in raw)
