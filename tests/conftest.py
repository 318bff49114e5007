"""Fixtures: the NVML stand-in, scenarios for it, the daemon in a process of its own, and clocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gpu_oom_exporter.sources.procfs import HOST_PID_NAMESPACE

# the suite is deterministic, and a loaded machine is no failure
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "gpu_oom_exporter"]
MIB = 1024 * 1024
GIB = 1024 * MIB


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="accept what the code does now; then read the diff")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def need(found: object, what: str) -> None:
    """Skip with the reason when a part is missing; on CI a missing part is a failure."""
    if found:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing on CI: {what}")
    pytest.skip(f"missing: {what}")


class ManualClock:
    """A clock that moves when it is told to. `sleep` waits until it has."""

    def __init__(self, mono: float = 1000.0, wall: float = 1_800_000_000.0) -> None:
        self.now = mono
        self.offset = wall - mono

    def time(self) -> float:
        return self.now + self.offset

    def mono(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds
        while self.now < due:
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ------------------------------------------------------------------------------------ the stand-in


def compile_stand_in(folder: Path, *flags: str) -> Path:
    need(shutil.which("gcc"), "gcc, for the stand-in of libnvidia-ml")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    source = HERE / "nvml" / "libnvidia-ml.c"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation", *flags]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return folder


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the stand-in libnvidia-ml.so.1."""
    return compile_stand_in(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without memory v2 and the _v3 process lists, as a driver of 2021."""
    return compile_stand_in(tmp_path_factory.mktemp("nvml-old"), "-DOLD_LIBRARY")


@dataclass
class Scenario:
    """What the stand-in answers; `write` puts it in place at once, also under a running reader."""

    path: Path
    device_file: Path
    lines: list[str] = field(default_factory=list)

    def gpus(self, count: int = 1, used: int = 10 * GIB, name: str = "NVIDIA H100 80GB HBM3") -> Scenario:
        for index in range(count):
            bus = f"00000000:{0x1A + 16 * index:02X}:00.0"
            self.lines.append(
                f"gpu {index} GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd {bus} {index} "
                f"{80 * GIB} {600 * MIB} {used} 42 {name}"
            )
        return self

    def process(
        self, pid: int, used: int | str = 9 * GIB, gpu: int = 0, kind: str = "compute", gi: int = -1, sm: int = 0
    ) -> Scenario:
        self.lines.append(f"process {gpu} {kind} {pid} {used} {gi} {-1 if gi < 0 else 0} {sm}")
        return self

    def add(self, line: str) -> Scenario:
        self.lines.append(line)
        return self

    def write(self) -> Scenario:
        new = self.path.with_suffix(".new")
        new.write_text("\n".join([f"device-file {self.device_file}", *self.lines]) + "\n")
        new.rename(self.path)
        return self

    def without(self, start: str) -> Scenario:
        self.lines = [line for line in self.lines if not line.startswith(start)]
        return self


@pytest.fixture
def scenario(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """An empty scenario, with the stand-in on the library path of every child process."""
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    monkeypatch.setenv("GPU_OOM_NVML_SCENARIO", str(tmp_path / "scenario"))
    return Scenario(tmp_path / "scenario", device)


def sysfs(root: Path, *addresses: str, suspended: tuple[str, ...] = (), vfio: tuple[str, ...] = ()) -> Path:
    """A /sys with NVIDIA display functions at *addresses* and one network card."""
    devices = root / "bus" / "pci" / "devices"
    for address in (*addresses, "0000:00:03.0"):
        folder = devices / address
        (folder / "power").mkdir(parents=True, exist_ok=True)
        nvidia = address != "0000:00:03.0"
        (folder / "vendor").write_text("0x10de\n" if nvidia else "0x8086\n")
        (folder / "class").write_text("0x030200\n" if nvidia else "0x020000\n")
        (folder / "power" / "runtime_status").write_text("suspended\n" if address in suspended else "active\n")
        driver = folder / "driver"
        if address in vfio and not driver.is_symlink():
            driver.symlink_to("../../../bus/pci/drivers/vfio-pci")
    return root


def host_proc(root: Path, *pids: int) -> Path:
    """This machine's /proc as the host's, with *pids*: a container's PID namespace would rightly end attribution."""
    (root / "self" / "ns").mkdir(parents=True)
    (root / "self" / "ns" / "pid").symlink_to(HOST_PID_NAMESPACE)
    (root / "self" / "ns" / "net").symlink_to(os.readlink("/proc/self/ns/net"))
    for name in (*map(str, pids), "uptime", "meminfo"):
        (root / name).symlink_to(f"/proc/{name}")
    return root


def wait_until(claim: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll *claim* until it is true and return it; fail after *seconds*."""
    end = time.monotonic() + seconds
    while True:
        found = claim()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {claim}")
        time.sleep(0.02)


# -------------------------------------------------------------------------------------- the daemon


@dataclass
class Daemon:
    """The real daemon in a process of its own."""

    process: subprocess.Popen[bytes]
    log_path: Path
    url: str = ""

    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str = "/metrics", **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        try:
            with urllib.request.urlopen(request, timeout=5) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()

    def value(self, series: str) -> float | None:
        """The value of the series whose line begins with *series*; None when it is absent."""
        status, page = self.get()
        if status != 200:
            return None
        found = re.search(rf"^{re.escape(series)}[^\n]* (\S+)$", page, re.MULTILINE)
        return float(found.group(1)) if found else None

    def wait_for(self, series: str, value: float | None, seconds: float = 20.0) -> None:
        wait_until(lambda: self.get()[0] == 200 and self.value(series) == value, seconds)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Send *number* and return the seconds until the daemon had ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout=10)
        return time.monotonic() - began


StartDaemon = Callable[..., Daemon]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons on free ports; whatever still runs at the end of the test is killed."""
    running: list[Daemon] = []

    def start(*arguments: str, ready: bool = True, environment: dict[str, str] | None = None) -> Daemon:
        log_path = tmp_path / f"daemon-{len(running)}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *COMMAND,
                    "serve",
                    "--web.listen-address=127.0.0.1:0",
                    f"--storage.path={tmp_path}/storage",
                    *(f"--path.{log}={tmp_path}/none" for log in ("docker-logs", "pod-logs", "journal", "kmsg")),
                    *arguments,
                ],
                stderr=log,
                stdout=log,
                env={**os.environ, **(environment or {})},
            )
        daemon = Daemon(process, log_path)
        running.append(daemon)

        def listening() -> str | None:
            found = re.search(r"url=(http://\S+?)/metrics", daemon.log())
            assert process.poll() is None or found, daemon.log()
            return found.group(1) if found else None

        daemon.url = wait_until(listening)
        if ready:
            wait_until(lambda: daemon.get("/-/ready")[0] == 200)
        return daemon

    yield start
    for daemon in running:
        if daemon.process.poll() is None:
            # a reader that hangs in the stand-in would outlive its daemon by an hour
            readers = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
            threads = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
            readers += [pid for path in threads for pid in path.read_text().split()]
            daemon.process.kill()
            for pid in set(readers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        daemon.process.wait(timeout=10)


def golden(path: Path, text: str, update: bool) -> None:
    """Compare *text* with the file *path*, byte for byte."""
    if update:
        path.write_text(text)
    assert path.exists(), f"{path} is missing; run pytest --update-golden and read it"
    assert path.read_text() == text


def as_json(value: Any) -> str:
    return (
        json.dumps(value, indent=1, sort_keys=True, default=lambda v: sorted(v) if isinstance(v, frozenset) else str(v))
        + "\n"
    )
