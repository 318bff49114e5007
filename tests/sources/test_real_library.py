"""The real libnvidia-ml of Debian, on a machine without the driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_oom_exporter.model import Reason
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.nvml import NvmlSource
from gpu_oom_exporter.sources.procfs import Reader as ProcReader
from tests.conftest import HERE, ManualClock, need

LIBRARY = HERE.parent / "build" / "libnvidia-ml"


async def test_library_without_driver(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library says that the driver is not loaded, and so do we."""
    need((LIBRARY / "libnvidia-ml.so.1").exists(), "libnvidia-ml1 of Debian non-free (make test fetches it)")
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has the driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(LIBRARY))
    node = Path("/dev/nvidiactl")
    was_there = node.exists()
    source = NvmlSource(clock, ProcReader(), str(tmp_path))
    with pytest.raises(SourceError) as caught:
        await source.read()
    if not was_there:
        node.unlink(missing_ok=True)  # the library makes it for root, driver or not
    assert caught.value.reason is Reason.NO_DRIVER
    assert "driver" in caught.value.detail
    await source.close()


@pytest.mark.gpu
async def test_a_real_gpu(tmp_path: Path, clock: ManualClock) -> None:
    """On a real GPU the sum holds and the identity is there."""
    if not os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has no NVIDIA driver")
    source = NvmlSource(clock, ProcReader(), str(tmp_path))
    try:
        facts = await source.read()
    finally:
        await source.close()
    assert facts.driver_version
    for gpu in facts.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.up
        if gpu.memory is not None and gpu.memory.reserved_bytes is not None:
            memory = gpu.memory
            assert memory.total_bytes == memory.used_bytes + memory.free_bytes + gpu.memory.reserved_bytes
