"""How cgroup paths name the container, unit or job a process belongs to: one row per runtime."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

ID = r"(?P<id>[0-9a-f]{64})"


@dataclass(frozen=True, slots=True)
class CgroupRow:
    """A runtime and how its cgroup paths look; the group `id` names the container, unit or job."""

    runtime: str
    pattern: re.Pattern[str]


ROWS = (
    # Kubernetes paths hold the runtime's own spelling as well: containerd and CRI-O before Docker's plain one
    CgroupRow("containerd", re.compile(rf"cri-containerd-{ID}\.scope")),
    CgroupRow("crio", re.compile(rf"crio-(?:conmon-)?{ID}(?:\.scope)?")),
    CgroupRow("podman", re.compile(rf"libpod-(?:payload-|conmon-)?{ID}(?:\.scope)?")),
    CgroupRow("docker", re.compile(rf"docker-{ID}\.scope")),
    CgroupRow("docker", re.compile(rf"/docker/{ID}")),
    CgroupRow("containerd", re.compile(rf"/kubepods[^:]*/{ID}")),
    CgroupRow("containerd", re.compile(rf"/(?:default|k8s\.io|moby)/{ID}")),
    CgroupRow("lxc", re.compile(r"/lxc(?:\.payload)?[./](?P<id>[^/]+)")),
    CgroupRow("slurm", re.compile(r"/(?:slurm\w*|slurmstepd\.scope)/(?:[^:]*/)?job_(?P<id>\d+)")),
    CgroupRow("systemd", re.compile(r".*/(?P<id>[^/]+\.service)(?:/|$)")),
)


@lru_cache(1024)  # asked several times a second about the same few cgroups
def workload_of(cgroup: str) -> tuple[str, str] | None:
    """(runtime, id) of the container, Slurm job or systemd unit that a cgroup path names; None for a login session."""
    for row in ROWS:
        found = row.pattern.search(cgroup)
        if found is not None and not found.group("id").startswith("user@"):
            return row.runtime, found.group("id")
    return None
