"""Whole hosts replayed: what NVML, /proc and an engine said, and the page that follows, byte for byte.

A capture is a folder `<gpu>__<driver>__<engine>__<state>` with `nvml.json` (the reader's reply), `proc.json`
(PID → files), `engine.prom` and `expected.metrics`. The first one is composed by hand around a captured engine page.
`pytest --update-golden` accepts what the code does now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_oom_exporter import config
from gpu_oom_exporter.catalog.metrics import families
from gpu_oom_exporter.daemon import Daemon, World
from gpu_oom_exporter.publish.exposition import write
from gpu_oom_exporter.sources.engines import EngineSource
from gpu_oom_exporter.sources.host import HostSource
from gpu_oom_exporter.sources.nvml import NvmlSource
from gpu_oom_exporter.sources.procfs import HOST_PID_NAMESPACE
from gpu_oom_exporter.sources.procfs import Reader as ProcReader
from tests.conftest import HERE, ManualClock, golden, sysfs

CAPTURES = sorted(path for path in (HERE / "captures").iterdir() if "__" in path.name)
OWN = ("process_", "gpu_oom_build_info", "gpu_oom_source_duration")
"""Families that say something about the run and not about the captured host."""


class Replay:
    """An NVML reader that repeats one reply."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply

    async def ask(self) -> Mapping[str, Any]:
        return self.reply

    def gone(self) -> bool:
        return True

    def stop(self, force: bool) -> None: ...


def build_proc(root: Path, described: Mapping[str, Mapping[str, Any]]) -> Path:
    """A /proc tree from its description: `sockets` are inodes of open sockets, everything else is a file."""
    for pid, own in described.items():
        for folder in ("ns", "fd", "net"):
            (root / pid / folder).mkdir(parents=True)
        (root / pid / "ns" / "net").symlink_to("net:[4026531840]")
        for name, content in own.items():
            if name == "sockets":
                for number, inode in enumerate(content):
                    (root / pid / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
            else:
                (root / pid / name).write_text(content)
    (root / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapFree: 0 kB\n")
    (root / "uptime").write_text("9000 0\n")
    (root / "self" / "ns").mkdir(parents=True)
    (root / "self" / "ns" / "pid").symlink_to(HOST_PID_NAMESPACE)
    (root / "self" / "ns" / "net").symlink_to("net:[4026531840]")
    return root


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
async def test_capture(capture: Path, tmp_path: Path, clock: ManualClock, update_golden: bool) -> None:
    """The page of a captured host."""
    reply = json.loads((capture / "nvml.json").read_text())
    page = (capture / "engine.prom").read_bytes()
    root = build_proc(tmp_path / "proc", json.loads((capture / "proc.json").read_text()))

    async def fetch(url: str, limit: int, token: str | None, timeout: float) -> bytes:
        return page if url.endswith("/metrics") else b'{"version": "0.32.0"}'

    proc = ProcReader(str(root), cgroupfs=str(tmp_path / "sys" / "fs" / "cgroup"))
    settings = config.Config(engines=(config.Engine(name="chat", url="http://127.0.0.1:8000"),))
    addresses = [gpu["bus"][4:].lower() for gpu in reply["gpus"]]
    sources = (
        NvmlSource(clock, proc, str(tmp_path / "storage"), start=lambda: Replay(reply)),
        HostSource(str(root), str(sysfs(tmp_path / "sys", *addresses))),
        EngineSource(settings.engines[0], fetch, clock, proc),  # type: ignore[arg-type]
    )
    daemon = Daemon(World(sources, clock), settings)
    for _ in range(4):
        for source in sources:
            await daemon.board.read_once(source)
        daemon.tick()
        clock.advance(5.0)
    assert daemon.state.report is not None
    told = [family for family in families(daemon.state.report) if not family.name.startswith(OWN)]
    golden(capture / "expected.metrics", write(told).decode(), update_golden)
