"""The parent's side of the reader: deadlines, back-off, release, and readers that will not die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_oom_exporter.model import Gap, MemoryKind, Reason
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.nvml import LOST_AGAIN_SECONDS, NEW_GPU_SECONDS, NvmlSource, ReaderProcess
from gpu_oom_exporter.sources.procfs import Reader as ProcReader
from tests.conftest import GIB, ManualClock, Scenario, sysfs, wait_until


def source(clock: ManualClock, storage: Path, **more: Any) -> NvmlSource:
    return NvmlSource(clock, ProcReader(), str(storage), sysfs="/nonexistent", **more)


async def reason(nvml: NvmlSource) -> Reason:
    with pytest.raises(SourceError) as caught:
        await nvml.read()
    return caught.value.reason


def readers() -> list[int]:
    """PIDs of our children that are readers."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if b"nvml_reader" in command and parent == os.getpid() and state != "Z":
            found.append(pid)
    return found


async def test_facts(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A reading becomes facts; processes that NVML named are looked up in /proc."""
    scenario.gpus().process(os.getpid(), 3 * GIB, sm=50).process(2**22 + 1, GIB).write()
    nvml = source(clock, tmp_path)
    nvml.proc.host_pids = lambda: True  # type: ignore[method-assign]
    try:
        facts = await nvml.read()
    finally:
        await nvml.close()
    (gpu,) = facts.gpus
    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory_kind, gpu.gpu_ratio) == (80 * GIB, MemoryKind.DEDICATED, 0.42)
    assert gpu.processes is not None
    assert [(p.pid, p.used_bytes, p.sm_ratio) for p in gpu.processes] == [
        (os.getpid(), 3 * GIB, 0.5),
        (2**22 + 1, GIB, 0.0),
    ]
    assert facts.processes[os.getpid()].ppid == os.getppid()
    assert 2**22 + 1 not in facts.processes, "a PID that is gone is normal"


async def test_other_pid_namespace(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """Outside the host's PID namespace no PID is looked up: it would be somebody else."""
    scenario.gpus().process(os.getpid(), 3 * GIB).write()
    nvml = source(clock, tmp_path)
    nvml.proc.host_pids = lambda: False  # type: ignore[method-assign]
    try:
        facts = await nvml.read()
    finally:
        await nvml.close()
    assert not facts.host_pids
    assert facts.processes == {}


async def test_windows_subsystem(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """Figures that Windows keeps to itself are a gap of their own."""
    scenario.gpus().process(100, "NA").write()
    nvml = source(clock, tmp_path)
    nvml._wsl = True
    try:
        assert (await nvml.read()).gpus[0].gaps == {Gap.WDDM}
    finally:
        await nvml.close()


async def test_back_off(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library the reader is started again after 1, 2, 5, ... seconds, and the reason stays the same."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    started = []

    def start() -> ReaderProcess:
        started.append(clock.now)
        return ReaderProcess("/nonexistent")

    nvml = source(clock, tmp_path, start=start)
    began = clock.now
    for _ in range(20):
        assert await reason(nvml) is Reason.NO_LIBRARY
        wait_until(lambda: nvml._link is None or nvml._link.gone())
        clock.advance(1.0)
    assert [moment - began for moment in started] == [0.0, 1.0, 3.0, 8.0]
    assert readers() == []


async def test_driver_comes_back(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """After the driver was lost a new reader finds it again."""
    scenario.gpus().write()
    nvml = source(clock, tmp_path)
    try:
        await nvml.read()
        scenario.add("error * * 9").write()
        assert await reason(nvml) is Reason.DRIVER_LOST
        scenario.without("error").write()
        wait_until(lambda: nvml._link is None or nvml._link.gone())
        clock.advance(1.5)
        assert (await nvml.read()).gpus[0].up
    finally:
        await nvml.close()


async def test_the_reader_is_killed(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A reader that somebody kills is replaced, once its end was seen."""
    scenario.gpus().write()
    nvml = source(clock, tmp_path)
    try:
        await nvml.read()
        (pid,) = readers()
        os.kill(pid, signal.SIGKILL)
        assert await reason(nvml) is Reason.READER_FAILED
        wait_until(lambda: not readers())
        clock.advance(1.5)
        await nvml.read()
        assert readers() != [pid]
    finally:
        await nvml.close()


async def test_hung_call(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A call that hangs for an hour costs one deadline; the reader is killed and the next one works."""
    scenario.gpus().write()
    nvml = source(clock, tmp_path, deadline_seconds=0.5)
    try:
        scenario.add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
        assert await reason(nvml) is Reason.STUCK
        wait_until(lambda: not readers())
        scenario.without("delay").write()
        clock.advance(1.5)
        nvml.deadline_seconds = 8.0
        assert (await nvml.read()).gpus[0].up
    finally:
        await nvml.close()


async def test_a_reader_that_cannot_be_killed(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """It never gets a sibling, is remembered by the next daemon, and closing does not wait for it."""
    scenario.gpus().add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
    immortal = lambda child: None  # noqa: E731 - a kill that the kernel does not carry out
    nvml = source(clock, tmp_path, deadline_seconds=0.3, start=lambda: ReaderProcess("/nonexistent", immortal))
    assert await reason(nvml) is Reason.STUCK
    (pid,) = readers()
    for _ in range(5):
        clock.advance(100.0)
        assert await reason(nvml) is Reason.STUCK
    assert readers() == [pid]
    began = time.monotonic()
    await nvml.close()
    assert time.monotonic() - began < 1.5
    # the next daemon: the note names this process as the reader's daemon, so it must look dead
    (note,) = tmp_path.glob("nvml-reader-*")
    words = note.read_text().split()
    note.write_text(" ".join([words[0], words[1], "4194304", "1"]))
    successor = source(clock, tmp_path)
    assert await reason(successor) is Reason.STUCK
    assert readers() == [pid]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: nvml._link is not None and nvml._link.gone())
    scenario.without("delay").write()
    assert (await successor.read()).gpus[0].up
    await successor.close()
    assert list(tmp_path.glob("nvml-reader-*")) == []


async def test_notes_of_other_daemons(clock: ManualClock, tmp_path: Path, scenario: Scenario) -> None:
    """A living reader of a living daemon is its own business; notes of the dead and garbage do no harm."""
    scenario.gpus().write()
    proc = ProcReader()
    me = proc.stat(os.getpid())
    assert me is not None
    (tmp_path / "nvml-reader-1").write_text(f"{os.getpid()} {me[3]} {os.getpid()} {me[3]}\n")
    (tmp_path / "nvml-reader-2").write_text("4194304 12 4194304 12\n")
    (tmp_path / "nvml-reader-3").write_text("garbage\n")
    os.mkfifo(tmp_path / "nvml-reader-4")
    nvml = source(clock, tmp_path)
    try:
        await nvml.read()
    finally:
        await nvml.close()
    assert sorted(p.name for p in tmp_path.glob("nvml-reader-*")) == ["nvml-reader-1", "nvml-reader-4"]


async def test_release(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """SIGUSR1's work: nobody holds the device file until the marker is removed."""
    scenario.gpus().write()
    nvml = source(clock, tmp_path / "storage")

    def open_files() -> int:
        folders = [f"/proc/{pid}/fd" for pid in (os.getpid(), *readers())]
        links = [os.readlink(f"{f}/{name}") for f in folders for name in os.listdir(f) if os.path.islink(f"{f}/{name}")]
        return links.count(str(scenario.device_file))

    try:
        await nvml.read()
        assert open_files() == 1
        nvml.release()
        assert await reason(nvml) is Reason.RELEASED
        wait_until(lambda: not readers())
        assert open_files() == 0
        assert await reason(nvml) is Reason.RELEASED
        Path(nvml.marker).unlink()
        await nvml.read()
        assert open_files() == 1
    finally:
        await nvml.close()


async def test_release_without_storage(scenario: Scenario, clock: ManualClock) -> None:
    """Where no marker can be written, the driver is released until the daemon is restarted."""
    scenario.gpus().write()
    nvml = source(clock, Path("/proc/nowhere"))
    try:
        await nvml.read()
        nvml.release()
        assert await reason(nvml) is Reason.RELEASED
        assert await reason(nvml) is Reason.RELEASED
    finally:
        await nvml.close()


async def test_a_lost_gpu_is_looked_for_again(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """Only a new nvmlInit sees a GPU that came back from a reset: one is made every five minutes, without a gap."""
    scenario.gpus(2).add("error nvmlDeviceGetMemoryInfo_v2 1 15").write()
    nvml = source(clock, tmp_path)
    try:
        assert [gpu.up for gpu in (await nvml.read()).gpus] == [True, False]
        (first,) = readers()
        scenario.without("error").add("driver 580.99").write()
        clock.advance(LOST_AGAIN_SECONDS - 1)
        await nvml.read()
        assert readers() == [first], "the same reader still"
        scenario.add("error nvmlDeviceGetMemoryInfo_v2 1 15").write()
        await nvml.read()
        clock.advance(LOST_AGAIN_SECONDS + 1)
        scenario.without("error").write()
        facts = await nvml.read()
        assert [gpu.up for gpu in facts.gpus] == [True, True]
        assert facts.driver_version == "580.99"
        assert readers() != [first]
    finally:
        await nvml.close()


async def test_a_gpu_that_comes_back(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A GPU that NVML does not list at its start is looked for again as well, as long as it is on the bus."""
    root = sysfs(tmp_path / "sys", "0000:1a:00.0", "0000:2a:00.0")
    scenario.gpus(2).without("gpu 1").write()
    nvml = NvmlSource(clock, ProcReader(), str(tmp_path), sysfs=str(root))
    try:
        for _ in range(3):
            assert len((await nvml.read()).gpus) == 1
            clock.advance(LOST_AGAIN_SECONDS + 1)
        scenario.lines.clear()
        scenario.gpus(2).write()
        assert [gpu.up for gpu in (await nvml.read()).gpus] == [True, True]
    finally:
        await nvml.close()


async def test_a_gpu_that_joins(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A GPU handed back by a virtual machine is seen by NVML within seconds of appearing."""
    both = ("0000:1a:00.0", "0000:2a:00.0")
    root = sysfs(tmp_path / "sys", *both, vfio=both[1:])
    scenario.gpus(2).without("gpu 1").write()
    nvml = NvmlSource(clock, ProcReader(), str(tmp_path), sysfs=str(root))
    try:
        assert len((await nvml.read()).gpus) == 1
        (root / "bus" / "pci" / "devices" / both[1] / "driver").unlink()
        scenario.lines.clear()
        scenario.gpus(2).write()
        for _ in range(31):  # until the bus is listed again
            await nvml.read()
        clock.advance(NEW_GPU_SECONDS + 1)
        assert [gpu.up for gpu in (await nvml.read()).gpus] == [True, True]
    finally:
        await nvml.close()


@pytest.mark.parametrize("released", [False, True])
async def test_a_shutdown_that_hangs(scenario: Scenario, clock: ManualClock, tmp_path: Path, released: bool) -> None:
    """A reader that was asked to end and hangs in nvmlShutdown is killed, whatever it was to end for."""
    scenario.gpus(2).add("error nvmlDeviceGetMemoryInfo_v2 1 15").add("delay nvmlShutdown * 3600000").write()
    nvml = source(clock, tmp_path)
    try:
        await nvml.read()
        if released:
            nvml.release()
        else:
            clock.advance(LOST_AGAIN_SECONDS + 1)
        await reason(nvml)
        assert len(readers()) == 1
        clock.advance(3.0)
        await reason(nvml)
        wait_until(lambda: not readers())
        if not released:
            await nvml.read()
    finally:
        await nvml.close()


async def test_a_lost_gpu_is_logged_once(
    scenario: Scenario, clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it begins and when it ends, not at every reading."""
    caplog.set_level("INFO")
    scenario.gpus(2).write()
    nvml = source(clock, tmp_path)
    try:
        for error in (False, True, True, False, False):
            scenario.without("error")
            (scenario.add("error nvmlDeviceGetMemoryInfo_v2 1 15") if error else scenario).write()
            await nvml.read()
    finally:
        await nvml.close()
    assert [record.getMessage() for record in caplog.records] == ["GPU down", "GPU no longer down"]
    assert vars(caplog.records[0])["gpu"] == 1


async def test_xids_add_up(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """Counts go on over the life of a reader."""
    scenario.gpus().add("event 1 0 31").write()
    nvml = source(clock, tmp_path)
    try:
        assert [(x.xid, x.count) for x in (await nvml.read()).xids] == [(31, 1)]
        (pid,) = readers()
        os.kill(pid, signal.SIGKILL)
        await reason(nvml)
        wait_until(lambda: not readers())
        clock.advance(2.0)
        scenario.add("event 2 0 31").write()
        assert [(x.xid, x.count) for x in (await nvml.read()).xids] == [(31, 3)], "a new reader is told both"
    finally:
        await nvml.close()


class Nonsense:
    """A reader that answers what it likes."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def ask(self) -> Any:
        return self.reply

    def gone(self) -> bool:
        return True

    def stop(self, force: bool) -> None:
        pass


@pytest.mark.parametrize(
    "reply", [None, {}, {"reason": "?"}, {"gpus": 3, "xids": [], "driver": ""}, {"gpus": [{}], "xids": [], "driver": 1}]
)
async def test_nonsense_from_the_reader(clock: ManualClock, tmp_path: Path, reply: Any) -> None:
    """Whatever comes over the pipe is a failed reading, never an exception of another kind."""
    assert await reason(source(clock, tmp_path, start=lambda: Nonsense(reply))) is Reason.READER_FAILED


async def test_a_reader_that_speaks_no_json(clock: ManualClock, tmp_path: Path) -> None:
    """Garbage bytes on the pipe."""

    class Garbage(ReaderProcess):
        def __init__(self) -> None:
            super().__init__("/nonexistent")
            self.stop(force=True)
            self.child.wait()
            assert self.gone()
            self.child = subprocess.Popen(
                [sys.executable, "-c", "input(); print('\\x00{]')"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    nvml = source(clock, tmp_path, start=Garbage)
    assert await reason(nvml) is Reason.READER_FAILED
    await nvml.close()


async def test_no_reader_can_be_started(clock: ManualClock, tmp_path: Path) -> None:
    """A machine out of processes."""

    def start() -> ReaderProcess:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    assert await reason(source(clock, tmp_path, start=start)) is Reason.READER_FAILED


async def test_cancelled_reading(scenario: Scenario, clock: ManualClock, tmp_path: Path) -> None:
    """A reading that is cancelled mid-way leaves no reader behind after close."""
    scenario.gpus().add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
    nvml = source(clock, tmp_path)
    task = asyncio.create_task(nvml.read())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nvml.close()
    wait_until(lambda: not readers())
