"""Names of containers and pods, from the Docker API's socket and the kubelet's log links; no API server.

What cannot be read costs the names only. A runtime counts as complete when it listed every container it knows:
only then does its silence about one prove anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from gpu_oom_exporter.model import Container, ContainerFacts

ANSWER_BYTES = 16 * 1024 * 1024
TIMEOUT_SECONDS = 5.0

LOG_LINK = re.compile(r"(?P<pod>[^_]+)_(?P<namespace>[^_]+)_(?P<container>.+)-(?P<id>[0-9a-f]{64})\.log")
"""How the kubelet names its links in /var/log/containers."""


class ContainerSource:
    """Lists containers by *docker_socket* and pods by the log links in *log_links*."""

    name = "containers"
    key = ""
    timeout_seconds = TIMEOUT_SECONDS + 2.0
    stale_seconds = 120.0
    period_seconds = 30.0

    def __init__(self, docker_socket: str = "/var/run/docker.sock", log_links: str = "/var/log/containers") -> None:
        self.docker_socket = docker_socket
        self.log_links = log_links

    async def read(self) -> ContainerFacts:
        """One listing of whatever can be listed here."""
        found: dict[str, Container] = {}
        complete: set[str] = set()
        listed = await self._docker()
        if listed is not None:
            complete.add("docker")
            found.update(listed)
        found.update(self._pods())
        return ContainerFacts(found, frozenset(complete))

    async def _docker(self) -> Mapping[str, Container] | None:
        """Every container that Docker knows, stopped ones included; None when it cannot be asked."""
        if not os.path.exists(self.docker_socket):
            return None
        try:
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.docker_socket)) as session,
                session.get("http://docker/containers/json?all=1", allow_redirects=False) as got,
            ):
                if got.status != 200:
                    return None
                body = bytearray()
                async for chunk in got.content.iter_any():
                    body += chunk
                    if len(body) > ANSWER_BYTES:
                        return None
            return {c.id: c for c in map(_container, json.loads(body))}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError, KeyError, AttributeError):
            return None  # a half answer must never make a container look gone

    def _pods(self) -> dict[str, Container]:
        """Containers by the names of the kubelet's log links."""
        found = {}
        try:
            names = os.listdir(self.log_links)
        except OSError:
            return {}
        for name in names:
            match = LOG_LINK.fullmatch(name)
            if match is not None:
                found[match["id"]] = Container(match["id"], match["container"], match["namespace"], match["pod"])
        return found

    async def close(self) -> None:
        """Nothing is held."""


def _container(raw: Mapping[str, Any]) -> Container:
    labels = raw.get("Labels") or {}
    names = raw.get("Names") or [""]
    # a compose service keeps its name over restarts and replicas; a container's own name does not
    name = (
        labels.get("io.kubernetes.container.name") or labels.get("com.docker.compose.service") or names[0].lstrip("/")
    )
    return Container(
        raw["Id"],
        str(name),
        str(labels.get("io.kubernetes.pod.namespace", "")),
        str(labels.get("io.kubernetes.pod.name", "")),
        raw.get("State") == "running",
    )
