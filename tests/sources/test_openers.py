"""Who has a device file open: real processes and descriptors, repeated scans, swaps, exits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_oom_exporter.sources.openers import FULL_SECONDS, Openers

CODE = """
import sys
files = {}
print("ok", flush=True)  # a starting interpreter opens and closes files of its own
for line in sys.stdin:
    what, path = line.split()
    if what == "open": files[path] = open(path)
    if what == "close": files.pop(path).close()
    if what == "swap": files.pop(path).close(); files["other"] = open("/dev/null")
    print("ok", flush=True)
"""


class Actor:
    """A process that opens and closes files when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.told()

    def does(self, what: str, path: Path) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {path}\n")
        self.process.stdin.flush()
        self.told()

    def told(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ok\n"


@pytest.fixture
def actor() -> Iterator[Actor]:
    found = Actor()
    with found.process:
        yield found
        found.process.kill()


def test_open_and_close(actor: Actor, tmp_path: Path) -> None:
    """Seen when opened, gone when closed, at the next scan."""
    device = tmp_path / "nvidia0"
    device.touch()
    openers = Openers("/proc", (str(tmp_path),))
    pid = actor.process.pid
    assert pid not in openers.scan(0.0)
    actor.does("open", device)
    assert openers.scan(1.0)[pid] == {str(device)}
    assert openers.scan(2.0)[pid] == {str(device)}
    actor.does("close", device)
    assert pid not in openers.scan(3.0)


def test_a_swap_keeps_the_count(actor: Actor, tmp_path: Path) -> None:
    """One descriptor swapped for another is found by the rolling full look, within a minute."""
    device = tmp_path / "nvidia0"
    device.touch()
    openers = Openers("/proc", (str(tmp_path),))
    pid = actor.process.pid
    actor.does("open", device)
    assert pid in openers.scan(0.0)
    actor.does("swap", device)
    assert pid not in openers.scan(FULL_SECONDS)


def test_an_exit(actor: Actor, tmp_path: Path) -> None:
    """A process that has ended is not there."""
    device = tmp_path / "nvidia0"
    device.touch()
    openers = Openers("/proc", (str(tmp_path),))
    actor.does("open", device)
    assert actor.process.pid in openers.scan(0.0)
    actor.process.kill()
    actor.process.wait()
    assert actor.process.pid not in openers.scan(1.0)


def test_nothing_to_see(tmp_path: Path) -> None:
    """A /proc that is not there, and one whose descriptors are closed to us."""
    assert Openers("/nonexistent").scan(0.0) == {}
    (tmp_path / "42").mkdir()
    assert Openers(str(tmp_path)).scan(0.0) == {}
    assert os.getpid() not in Openers("/proc", ("/dev/no-such-device",)).scan(0.0)
