"""A real Docker engine: `make test-docker`. The suite itself runs where there is none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.sources.containers import ContainerSource
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

pytestmark = pytest.mark.skipif(os.environ.get("DOCKER") != "1", reason="needs a Docker engine: make test-docker")


@pytest.fixture
def container() -> Iterator[str]:
    command = ["docker", "run", "--detach", "--rm", "--name", "gpu-oom-test", "busybox", "sleep", "300"]
    identity = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    yield identity
    subprocess.run(["docker", "rm", "--force", identity], capture_output=True)


async def test_names_and_cgroups(container: str) -> None:
    """A running container is listed under its name, and its process's cgroup leads to it."""
    facts = await ContainerSource().read()
    assert facts.complete == {"docker"}
    assert facts.by_id[container].name == "gpu-oom-test"
    inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    pid = int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    if not Path(f"/proc/{pid}").exists():
        pytest.skip("the Docker engine runs on another host")
    process = ProcReader().look(pid, 0.0)
    assert process is not None
    assert workload_of(process.cgroup) == ("docker", container)
    subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=True)
    assert container not in (await ContainerSource().read()).by_id
