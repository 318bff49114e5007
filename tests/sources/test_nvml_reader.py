"""The reader process: real pynvml over the C stand-in, one scenario per oddity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GIB, MIB, Scenario, sysfs

COMMAND = [sys.executable, "-P", "-m", "gpu_oom_exporter.sources.nvml_reader"]


class Reader:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def fds_on(self, path: Path) -> int:
        folder = f"/proc/{self.process.pid}/fd"
        return sum(os.readlink(f"{folder}/{name}") == str(path) for name in os.listdir(folder))


@contextmanager
def reader(root: str = "/nonexistent") -> Iterator[Reader]:
    process = subprocess.Popen([*COMMAND, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Reader(process)
        finally:
            process.kill()


def read_once(root: str = "/nonexistent") -> dict[str, Any]:
    with reader(root) as child:
        return child.read()


def test_a_plain_gpu(scenario: Scenario) -> None:
    """Identity, memory v2, processes of all kinds once, utilisation and recovery action."""
    scenario.gpus().process(100, 5 * GIB, sm=37).process(100, 5 * GIB, kind="graphics").process(
        101, 300 * MIB, kind="graphics"
    ).process(102, 2 * GIB, kind="mps").write()
    reply = read_once()
    assert reply["driver"] == "580.95.05"
    (gpu,) = reply["gpus"]
    assert {"memory": [80 * GIB, 10 * GIB, 70 * GIB - 600 * MIB, 600 * MIB], "kind": "dedicated"}.items() <= gpu.items()
    assert {"index": 0, "minor": 0, "bus": "00000000:1A:00.0", "up": True, "gpu_percent": 42}.items() <= gpu.items()
    assert gpu["uuid"].startswith("GPU-0000")
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert gpu["recovery"] == "none"
    assert sorted(gpu["processes"]) == [
        [100, "compute", 5 * GIB, 37],
        [101, "graphics", 300 * MIB, 0],
        [102, "mps", 2 * GIB, 0],
    ]
    assert reply["missing"] == 0


def test_a_client_of_mps(scenario: Scenario) -> None:
    """Clients are listed as compute and as MPS: they are MPS."""
    scenario.gpus().process(100, GIB).process(100, GIB, kind="mps").write()
    assert read_once()["gpus"][0]["processes"] == [[100, "mps", GIB, 0]]


def test_unknown_error_on_every_call(scenario: Scenario) -> None:
    """The device files were taken from the container (systemctl daemon-reload): the GPU is down, not well and empty."""
    scenario.gpus(2).write()
    with reader() as child:
        child.read()
        scenario.add("error * 0 999").write()
        assert [gpu["up"] for gpu in child.read()["gpus"]] == [False, True]
        scenario.add("error * * 999").write()
        assert child.read()["reason"] == "driver_lost"


def test_the_only_gpu_is_lost(scenario: Scenario, tmp_path: Path) -> None:
    """An nvmlInit that finds its only GPU lost is a reading of no GPU, with one missing."""
    root = sysfs(tmp_path / "sys", "0000:1a:00.0")
    scenario.gpus().add("error nvmlInitWithFlags * 15").write()
    reply = read_once(str(root))
    assert (reply["gpus"], reply["missing"]) == ([], 1)


def test_an_old_library(scenario: Scenario, old_stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the newer symbols: memory v1, in which reserved is used, and the _v2 process lists."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old_stand_in))
    scenario.gpus().process(100, 5 * GIB).write()
    (gpu,) = read_once()["gpus"]
    assert gpu["kind"] == "dedicated_v1"
    assert gpu["memory"] == [80 * GIB, 10 * GIB + 600 * MIB, 70 * GIB - 600 * MIB, None]
    assert gpu["processes"] == [[100, "compute", 5 * GIB, 0]]


def test_v2_answers_nonsense_on_wsl(scenario: Scenario) -> None:
    """An unknown error from v2 falls back to v1 for this reading."""
    scenario.gpus().add("error nvmlDeviceGetMemoryInfo_v2 * 999").write()
    assert read_once()["gpus"][0]["kind"] == "dedicated_v1"


def test_unified_memory(scenario: Scenario) -> None:
    """Memory info that is not supported at all means memory shared with the CPU."""
    scenario.gpus().process(100, 5 * GIB)
    scenario.add("error nvmlDeviceGetMemoryInfo_v2 * 3").add("error nvmlDeviceGetMemoryInfo * 3").write()
    (gpu,) = read_once()["gpus"]
    assert (gpu["up"], gpu["kind"], gpu["memory"]) == (True, "unified", None)
    assert gpu["processes"] == [[100, "compute", 5 * GIB, 0]]


def test_one_gpu_is_lost(scenario: Scenario) -> None:
    """One of four GPUs is lost while running: it is down, and the other three are untouched."""
    scenario.gpus(4).write()
    with reader() as child:
        assert [gpu["up"] for gpu in child.read()["gpus"]] == [True] * 4
        scenario.add("error * 2 15").write()
        reply = child.read()
    assert [gpu["up"] for gpu in reply["gpus"]] == [True, True, False, True]
    assert reply["gpus"][2]["code"] == "lost"
    assert reply["gpus"][2]["uuid"].startswith("GPU-00000002")
    assert [gpu["memory"] is None for gpu in reply["gpus"] if gpu["up"]] == [False] * 3


def test_a_gpu_without_handle(scenario: Scenario) -> None:
    """A GPU that NVML counts and gives no handle for is down from the first reading."""
    scenario.gpus(2).add("error nvmlDeviceGetHandleByIndex_v2 1 15").write()
    assert [gpu["up"] for gpu in read_once()["gpus"]] == [True, False]


def test_the_driver_goes_away(scenario: Scenario) -> None:
    """When no GPU knows the driver any more, the reader says so and ends, to be replaced."""
    scenario.gpus(2).write()
    with reader() as child:
        child.read()
        scenario.add("error * * 1").write()
        assert child.read()["reason"] == "driver_lost"
        assert child.process.wait(5) == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "no_driver"), (18, "mismatch"), (4, "no_permission"), (12, "no_library"), (999, "no_driver")],
)
def test_init_fails(scenario: Scenario, code: int, reason: str) -> None:
    """A failed nvmlInit ends the reader with a reason and a sentence; it is never tried twice in one life."""
    scenario.gpus().add(f"error nvmlInitWithFlags * {code}").write()
    with reader() as child:
        reply = child.read()
        assert reply["reason"] == reason
        assert reply["detail"]
        assert child.process.wait(5) == 1


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without libnvidia-ml."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert read_once()["reason"] == "no_library"


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libnvidia-ml.so.1 that is not an ELF file."""
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert read_once()["reason"] == "no_library"


def test_no_gpus(scenario: Scenario) -> None:
    """A driver without a GPU is a reading of nothing, not an error."""
    scenario.write()
    assert read_once()["gpus"] == []


def test_mig(scenario: Scenario) -> None:
    """Memory and processes per GPU instance; a second compute instance of one is not counted again."""
    scenario.gpus(used=30 * GIB)
    scenario.add(f"mig 0 0 1 0 {40 * GIB} {40 * MIB} {20 * GIB} 3g.40gb")
    scenario.add(f"mig 0 1 2 0 {20 * GIB} {20 * MIB} {5 * GIB} 1c.2g.20gb")
    scenario.add(f"mig 0 4 2 1 {20 * GIB} {20 * MIB} {5 * GIB} 1c.2g.20gb")
    scenario.process(100, 19 * GIB, gi=1).process(101, 4 * GIB, gi=2).write()
    (gpu,) = read_once()["gpus"]
    assert gpu["mig"] is True
    assert gpu["processes"] is None
    assert [(i["id"], i["profile"], i["memory"][1]) for i in gpu["instances"]] == [
        (1, "3g.40gb", 20 * GIB),
        (2, "2g.20gb", 5 * GIB),
    ]
    assert [i["processes"] for i in gpu["instances"]] == [
        [[100, "compute", 19 * GIB, 0]],
        [[101, "compute", 4 * GIB, 0]],
    ]


def test_mig_from_inside_a_container(scenario: Scenario) -> None:
    """The parent's lists are closed to us while the instance's memory is not: keep what can be had."""
    scenario.gpus().add(f"mig 0 0 1 0 {40 * GIB} {40 * MIB} {20 * GIB} 3g.40gb")
    for kind in ("Compute", "Graphics", "MPSCompute"):
        scenario.add(f"error nvmlDeviceGet{kind}RunningProcesses_v3 0 4")
    scenario.write()
    (gpu,) = read_once()["gpus"]
    (instance,) = gpu["instances"]
    assert instance["memory"][0] == 40 * GIB
    assert instance["processes"] is None
    assert instance["gaps"] == ["no_permission"]


def test_mig_lists_every_compute_instance(scenario: Scenario) -> None:
    """Where only the instances' own lists are open, those of all its compute instances are read."""
    scenario.gpus().add(f"mig 0 0 1 0 {40 * GIB} {40 * MIB} {20 * GIB} 3g.40gb")
    scenario.add(f"mig 0 1 1 1 {40 * GIB} {40 * MIB} {20 * GIB} 3g.40gb").process(100, GIB, gi=1)
    for kind in ("Compute", "Graphics", "MPSCompute"):
        scenario.add(f"error nvmlDeviceGet{kind}RunningProcesses_v3 parent 4")
    scenario.write()
    (instance,) = read_once()["gpus"][0]["instances"]
    assert instance["processes"] == [[100, "compute", GIB, None]]
    assert instance["gaps"] == []


def test_insane_values(scenario: Scenario) -> None:
    """What cannot be true is absent and counted: used over total, PID 0, more than the GPU has, 101 percent."""
    scenario.gpus(2)
    scenario.lines[1] = scenario.lines[1].replace(str(10 * GIB), str(90 * GIB)).replace(" 42 ", " 101 ")
    scenario.process(0).process(4294967295).process(100, 300 * GIB).process(101, "NA").process(102, GIB, sm=400).write()
    reply = read_once()
    assert reply["gpus"][1]["memory"] is None
    assert reply["gpus"][1]["gpu_percent"] is None
    assert sorted(reply["gpus"][0]["processes"]) == [
        [100, "compute", None, 0],
        [101, "compute", None, 0],
        [102, "compute", GIB, 0],
    ]
    assert reply["rejected"] == {"pid": 2, "process_memory": 1, "utilization": 2, "memory": 1}


def test_process_list_races(scenario: Scenario) -> None:
    """A list that grows between the two calls is asked again; one that never settles is unknown, not empty."""
    scenario.gpus().process(100, GIB).add("race 0 2").write()
    assert read_once()["gpus"][0]["processes"] == [[100, "compute", GIB, 0]]
    scenario.without("race").add("race 0 1000").write()
    assert read_once()["gpus"][0]["processes"] is None


def test_no_permission_for_processes(scenario: Scenario) -> None:
    """A list we may not see is a gap, and the memory stays."""
    scenario.gpus()
    for kind in ("Compute", "Graphics", "MPSCompute"):
        scenario.add(f"error nvmlDeviceGet{kind}RunningProcesses_v3 * 4")
    scenario.write()
    (gpu,) = read_once()["gpus"]
    assert gpu["processes"] is None
    assert "no_permission" in gpu["gaps"]
    assert gpu["memory"][0] == 80 * GIB


def test_xid_events(scenario: Scenario) -> None:
    """Every event is told once."""
    scenario.gpus(2).write()
    with reader() as child:
        assert child.read()["xids"] == []
        scenario.add("event 1 1 79").add("event 2 0 31").write()
        xids = child.read()["xids"]
        assert [(uuid[:12], xid) for uuid, xid in xids] == [("GPU-00000001", 79), ("GPU-00000000", 31)]
        assert child.read()["xids"] == []


def test_recovery_action(scenario: Scenario) -> None:
    """What the driver asks the operator to do."""
    scenario.gpus().add("recovery 0 2").write()
    assert read_once()["gpus"][0]["recovery"] == "node_reboot"


def test_vgpu_host(scenario: Scenario) -> None:
    """Memory that belongs to virtual machines is marked as such."""
    scenario.gpus().add("virtualization 0 3").write()
    assert read_once()["gpus"][0]["vgpu"] is True


def test_sleeping_gpus_are_not_woken(scenario: Scenario, tmp_path: Path) -> None:
    """While every NVIDIA function sleeps there is no nvmlInit; when one wakes, the other is still left alone."""
    both = ("0000:1a:00.0", "0000:2a:00.0")
    root = sysfs(tmp_path / "sys", *both, suspended=both)
    scenario.gpus(2).write()
    with reader(str(root)) as child:
        assert child.read()["reason"] == "suspended"
        assert child.fds_on(scenario.device_file) == 0
        sysfs(root, *both, suspended=both[1:])
        # whoever touches the sleeping GPU pays a second for it
        scenario.add("delay * 1 1000").write()
        began = time.monotonic()
        reply = child.read()
        assert [gpu["up"] for gpu in reply["gpus"]] == [True, None]
        assert [gpu["index"] for gpu in reply["gpus"]] == [0, None]
        assert time.monotonic() - began < 1.0, "the sleeper was asked"
        assert child.fds_on(scenario.device_file) == 1
        scenario.without("delay").write()
        sysfs(root, *both)
        reply = child.read()
        assert [(gpu["up"], gpu["index"]) for gpu in reply["gpus"]] == [(True, 0), (True, 1)]
        assert reply["gpus"][1]["memory"] is not None


def test_vfio_functions_do_not_count(scenario: Scenario, tmp_path: Path) -> None:
    """A GPU given to a virtual machine neither wakes us nor keeps us asleep."""
    root = sysfs(tmp_path / "sys", "0000:1a:00.0", "0000:2a:00.0", suspended=("0000:1a:00.0",), vfio=("0000:2a:00.0",))
    scenario.gpus(1).write()
    assert read_once(str(root))["reason"] == "suspended"


def test_it_ends_with_its_input(scenario: Scenario) -> None:
    """End of input shuts NVML down and ends the reader."""
    scenario.gpus().write()
    with reader() as child:
        child.read()
        assert child.fds_on(scenario.device_file) == 1
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(5) == 0
