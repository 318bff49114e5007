"""Memory limits: trees of both versions on disk, and a real cgroup of the kernel that runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_oom_exporter.sources.cgroups import room_ratio
from gpu_oom_exporter.sources.procfs import Reader

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> str:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return str(root)


def test_v2(tmp_path: Path) -> None:
    """The tightest limit above a process counts; page cache that would be dropped first is free."""
    root = tree(
        tmp_path,
        {
            "kubepods.slice/memory.max": 100 * GIB,
            "kubepods.slice/memory.current": 95 * GIB,
            "kubepods.slice/memory.stat": f"anon 5\ninactive_file {5 * GIB}\nactive_file 7",
            "kubepods.slice/pod/memory.max": "max",
            "kubepods.slice/pod/memory.current": 50 * GIB,
            "kubepods.slice/pod/c.scope/memory.max": 64 * GIB,
            "kubepods.slice/pod/c.scope/memory.current": 48 * GIB,
        },
    )
    assert room_ratio(root, "/kubepods.slice/pod/c.scope") == pytest.approx(0.10)
    assert room_ratio(root, "/kubepods.slice/pod") == pytest.approx(0.10)
    (tmp_path / "kubepods.slice/memory.current").write_text(f"{60 * GIB}\n")
    assert room_ratio(root, "/kubepods.slice/pod/c.scope") == 0.25


def test_v1(tmp_path: Path) -> None:
    """v1 writes no limit as a number near 2**63."""
    root = tree(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 5,
            "memory/docker/c/memory.limit_in_bytes": 8 * GIB,
            "memory/docker/c/memory.usage_in_bytes": 7 * GIB,
            "memory/docker/c/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
        },
    )
    assert room_ratio(root, "memory/docker/c") == 0.25
    assert room_ratio(root, "memory/") == 1.0


def test_a_container_s_own_root(tmp_path: Path) -> None:
    """Inside a cgroup namespace the root is the container, with its limit."""
    root = tree(tmp_path, {"memory.max": 10, "memory.current": 9, "cgroup.procs": 1})
    assert room_ratio(root, "/") == pytest.approx(0.1)


@pytest.mark.parametrize("folder", ["", "/../docker-ab.scope", "/gone", "memory/gone"])
def test_not_in_view(tmp_path: Path, folder: str) -> None:
    """What a container with a cgroup namespace of its own cannot see is unknown, not unlimited."""
    assert room_ratio(tree(tmp_path, {"cgroup.procs": 1}), folder) is None


@pytest.mark.parametrize("used", ["", "nonsense", "-1"])
def test_nonsense(tmp_path: Path, used: str) -> None:
    """A limit without a figure of use is unknown; more use than the limit is no room."""
    root = tree(tmp_path, {"a/memory.max": 10, "a/memory.current": used})
    assert room_ratio(root, "/a") is None
    tree(tmp_path, {"a/memory.current": 11})
    assert room_ratio(root, "/a") == 0.0


def test_this_kernel() -> None:
    """Of this very process: some share between nothing and all, or unknown."""
    process = Reader().look(os.getpid(), 0.0)
    assert process is not None
    assert process.memory_room_ratio is None or 0.0 < process.memory_room_ratio <= 1.0


def test_a_real_limit() -> None:
    """A real v1 memory cgroup with a limit and nobody in it has all its room."""
    folder = Path(f"/sys/fs/cgroup/memory/gpu-oom-exporter-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as err:
        pytest.skip(f"no memory cgroup (v1) of our own: {err}")
    try:
        assert room_ratio("/sys/fs/cgroup", f"memory/{folder.name}") == 1.0
    finally:
        folder.rmdir()
