"""The archive: positions and incidents together, once each, readable by their owner only."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from gpu_oom_exporter.model import Incident, LogOrigin, LogPosition, Recorded
from gpu_oom_exporter.publish.archive import KEPT, Archive, ArchiveError

ORIGIN = LogOrigin("pod:prod/vllm-0/vllm", "pod", "", "prod", "vllm-0", "vllm")


def oom(offset: int, category: str = "cuda_oom_runtime", time: float = 1000.0) -> Recorded:
    fields = {"gpu": 3, "listed_processes": [{"pid": 7, "used_bytes": 1}]}
    return Recorded(Incident(category, "critical", fields, offset, offset, "vllm", "0.32.0"), ORIGIN, "1:2:0", time)


def test_once(tmp_path: Path) -> None:
    """The same stream, file and offset is the same incident, whatever it is called the second time."""
    archive = Archive(str(tmp_path / "a.sqlite"))
    assert [oom(1), oom(2)] == archive.commit([oom(1), oom(2)], {}, 1.0)
    assert [oom(3)] == archive.commit([oom(2, "cuda_oom_generic"), oom(3)], {}, 2.0)
    assert archive.totals() == {"cuda_oom_runtime": (3, 1000.0)}


def test_survives(tmp_path: Path) -> None:
    """Everything comes back as it was after the file is opened again."""
    path = str(tmp_path / "deep" / "a.sqlite")
    position = LogPosition("1:2:0", 77, 4096)
    first = Archive(path)
    first.commit([oom(1, time=10.0), oom(2, time=20.0)], {"pod:x": position}, 20.0)
    first.close()
    again = Archive(path)
    assert {"pod:x": position} == again.positions()
    assert [oom(2, time=20.0)] == again.since(15.0)
    assert again.totals() == {"cuda_oom_runtime": (2, 20.0)}


def test_private(tmp_path: Path) -> None:
    """Nobody else can read it, also while it is new."""
    os.umask(0)
    try:
        archive = Archive(str(tmp_path / "new" / "a.sqlite"))
        archive.commit([oom(1)], {}, 1.0)
        assert stat.S_IMODE((tmp_path / "new" / "a.sqlite").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    finally:
        os.umask(0o022)


def test_together(tmp_path: Path) -> None:
    """A transaction that fails half way has stored nothing."""
    path = str(tmp_path / "a.sqlite")
    archive = Archive(path)
    archive.commit([], {"pod:x": LogPosition("1:2:0", 0, 1)}, 1.0)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE totals")
    with pytest.raises(ArchiveError, match=r"a\.sqlite: no such table: totals"):
        archive.commit([oom(1)], {"pod:x": LogPosition("1:2:0", 0, 999)}, 2.0)
    assert Archive(path).positions()["pod:x"].offset == 1
    assert Archive(path).since(0.0) == []


def test_bounded(tmp_path: Path) -> None:
    """Old incidents go, their totals stay."""
    archive = Archive(str(tmp_path / "a.sqlite"))
    archive.commit((oom(offset) for offset in range(KEPT + 50)), {}, 1.0)
    archive.commit([oom(KEPT + 50)], {}, 1.0)
    assert len(archive.since(0.0)) == KEPT
    assert archive.totals()["cuda_oom_runtime"][0] == KEPT + 51


@pytest.mark.parametrize("content", [b"this is no database" * 100, None])
def test_unusable(content: bytes | None, tmp_path: Path) -> None:
    """A file that is no database, or no file, is a sentence with its path."""
    path = tmp_path / "a.sqlite"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ArchiveError, match=r"a\.sqlite: "):
        Archive(str(path)).totals()
