"""The architecture, as a test: who may import whom, and which layers touch the world."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_oom_exporter

PACKAGE = Path(gpu_oom_exporter.__file__).parent

MAY_IMPORT = {
    "model": set(),
    "catalog": {"model", "catalog"},
    "config": {"model", "catalog"},
    "analysis": {"model", "catalog", "config", "analysis"},
    "sources": {"model", "catalog", "config", "sources"},
    "publish": {"model", "catalog", "config", "publish"},
    "simulate": {"model", "catalog", "config", "sources", "simulate"},
    "act": {"model", "catalog", "config", "sources", "analysis"},
    "daemon": {"model", "catalog", "config", "sources", "analysis", "publish", "simulate", "daemon"},
    "cli": {"model", "catalog", "config", "sources", "analysis", "publish", "simulate", "act", "daemon", "cli"},
    "__main__": {"cli"},
    "__init__": set(),
}
PURE = {"model", "catalog", "config", "analysis"}
WORLD = {"aiohttp", "asyncio", "os", "pathlib", "psutil", "pynvml", "socket", "subprocess", "time"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    """Every import from us is one that the layer may have, and pure layers import nothing of the world."""
    own = layer(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "gpu_oom_exporter":
            target = parts[1] if len(parts) > 1 else "__init__"
            if target == "__version__":
                continue
            assert target in MAY_IMPORT[own], f"{own} may not import {name}"
        elif own in PURE:
            assert parts[0] not in WORLD, f"{own} is pure and may not import {name}"


@pytest.mark.parametrize("path", [p for p in modules() if layer(p) in PURE], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pure_layers_open_nothing(path: Path) -> None:
    """The builtin `open` is not named where nothing is read."""
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert "open" not in names


def test_only_cli_prints() -> None:
    """Results are printed in one place."""
    for path in modules():
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "print" not in names or layer(path) == "cli", path


def test_the_reader_is_small() -> None:
    """The NVML reader imports the standard library, pynvml and nothing of ours but the PCI listing."""
    code = (
        "import sys; import gpu_oom_exporter.sources.nvml_reader; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))); "
        "print(*sorted(m for m in sys.modules if m.startswith('gpu_oom')))"
    )
    out = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    others, ours = out.splitlines()
    assert {"gpu_oom_exporter", "pynvml"} >= {m for m in others.split() if not m.startswith(("_", "sitecustomize"))}
    assert ours.split() == [
        "gpu_oom_exporter",
        "gpu_oom_exporter.sources",
        "gpu_oom_exporter.sources.nvml_reader",
        "gpu_oom_exporter.sources.pci",
    ]


def test_the_parent_never_loads_nvml() -> None:
    """The daemon's own process does not even import pynvml: it cannot open /dev/nvidia*."""
    code = "import sys; import gpu_oom_exporter.cli.serve; print('pynvml' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
