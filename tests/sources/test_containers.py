"""Names of containers and pods: captured answers on a real socket, log links in a real folder, and what fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gpu_oom_exporter.sources.containers import ContainerSource

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
LISTING = [
    {"Id": ONE, "Names": ["/llm-vllm-1"], "State": "running", "Labels": {"com.docker.compose.service": "vllm"}},
    {"Id": TWO, "Names": ["/sad_hopper"], "State": "exited", "Labels": {}},
    {
        "Id": THREE,
        "Names": ["/k8s_vllm_vllm-0"],
        "State": "running",
        "Labels": {
            "io.kubernetes.container.name": "vllm",
            "io.kubernetes.pod.name": "vllm-0",
            "io.kubernetes.pod.namespace": "llm",
        },
    },
]


@asynccontextmanager
async def docker(folder: Path, body: bytes, status: int = 200) -> AsyncIterator[str]:
    """Docker's socket with one answer; any other path or method fails the test."""
    asked = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.method, request.path_qs))
        return web.Response(body=body, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    path = str(folder / "docker.sock")
    await web.UnixSite(runner, path).start()
    try:
        yield path
        assert set(asked) == {("GET", "/containers/json?all=1")}
    finally:
        await runner.cleanup()


async def test_docker(tmp_path: Path) -> None:
    """Every container Docker knows, under the name people use; the listing is complete."""
    async with docker(tmp_path, json.dumps(LISTING).encode()) as socket:
        facts = await ContainerSource(socket, str(tmp_path / "none")).read()
    assert facts.complete == {"docker"}
    assert {c.id: (c.name, c.namespace, c.pod, c.running) for c in facts.by_id.values()} == {
        ONE: ("vllm", "", "", True),
        TWO: ("sad_hopper", "", "", False),
        THREE: ("vllm", "llm", "vllm-0", True),
    }


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        (b"{", 200),
        (b"{}", 500),
        (b'{"message": "no"}', 200),
        (b"[3]", 200),
        (b'[{"Names": []}]', 200),
        (b"[null]", 200),
    ],
)
async def test_half_answers_prove_nothing(tmp_path: Path, body: bytes, status: int) -> None:
    """An answer that makes no sense must never make a container look gone."""
    async with docker(tmp_path, body, status) as socket:
        facts = await ContainerSource(socket, str(tmp_path / "none")).read()
    assert facts.complete == frozenset()


async def test_no_socket(tmp_path: Path) -> None:
    """A host without Docker, or a socket nobody listens on."""
    assert (await ContainerSource(str(tmp_path / "none"), str(tmp_path / "none")).read()).complete == frozenset()
    (tmp_path / "dead.sock").touch()
    assert (await ContainerSource(str(tmp_path / "dead.sock"), str(tmp_path / "none")).read()).complete == frozenset()


async def test_log_links(tmp_path: Path) -> None:
    """Names of pods from the kubelet's links; anything else in the folder is passed over."""
    for name in (
        f"vllm-0_llm_vllm-{ONE}.log",
        f"a_b_c-d-{TWO}.log",
        "garbage",
        f"only_two-{THREE}.log",
        f"x_y_z-{ONE}.txt",
    ):
        (tmp_path / name).touch()
    facts = await ContainerSource(str(tmp_path / "none"), str(tmp_path)).read()
    assert {c.id: (c.namespace, c.pod, c.name) for c in facts.by_id.values()} == {
        ONE: ("llm", "vllm-0", "vllm"),
        TWO: ("b", "a", "c-d"),
    }
    assert facts.complete == frozenset(), "links prove that a container was there, not that another was not"
