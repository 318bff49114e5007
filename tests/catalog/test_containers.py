"""Cgroup paths of every runtime, v1 and v2, as they were seen in the field."""

from __future__ import annotations

import pytest

from gpu_oom_exporter.catalog.containers import workload_of

ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("cgroup", "workload"),
    [
        (f"/system.slice/docker-{ID}.scope", ("docker", ID)),
        (f"/docker/{ID}", ("docker", ID)),
        (f"/docker/{ID}/child", ("docker", ID)),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-{ID}.scope", ("containerd", ID)),
        (f"/kubepods/besteffort/pod1/{ID}", ("containerd", ID)),
        (f"/kubepods.slice/kubepods-pod1.slice/crio-{ID}.scope", ("crio", ID)),
        (f"/kubepods.slice/kubepods-pod1.slice/docker-{ID}.scope", ("docker", ID)),
        (f"/machine.slice/libpod-{ID}.scope/container", ("podman", ID)),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", ("podman", ID)),
        (f"/default/{ID}", ("containerd", ID)),
        ("/lxc.payload.box/init.scope", ("lxc", "box")),
        ("/lxc/box", ("lxc", "box")),
        ("/slurm/uid_1000/job_123/step_0", ("slurm", "123")),
        ("/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", ("slurm", "123")),
        ("/system.slice/vllm.service", ("systemd", "vllm.service")),
        ("/system.slice/vllm.service/workers", ("systemd", "vllm.service")),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service", ("systemd", "vllm.service")),
        ("/user.slice/user-1000.slice/session-2.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service", None),
        ("/", None),
        ("", None),
        ("/system.slice/docker-short.scope", None),
    ],
)  # fmt: skip
def test_rows(cgroup: str, workload: tuple[str, str] | None) -> None:
    """Runtime and id, or none for a login session."""
    assert workload_of(cgroup) == workload
