"""The metrics page of a simulated vLLM 0.32, byte-compatible with one captured from a real server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

from prometheus_client.utils import floatToGoString

TEMPLATE = "vllm_0.32.prom"
"""Captured from `vllm serve` 0.32.0 under load; every family, help text and label order is vLLM's."""

INFO = "vllm:cache_config_info"


def template() -> str:
    """The captured page."""
    return resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")


class VllmPage:
    """The captured page with other values, model name and pool."""

    def __init__(self, captured: str | None = None) -> None:
        captured = template() if captured is None else captured
        found = re.search(r'model_name="([^"]*)"', captured)
        self.captured_model = found.group(1) if found else ""
        self._lines = captured.split("\n")

    def render(self, model_name: str, values: Mapping[str, float], info: Mapping[str, str]) -> bytes:
        """The page of *model_name*.

        *values* are by series as the page spells them up to the blank, with the captured model name;
        *info* replaces labels of the pool's info family. What neither names stays as captured.
        """
        out = []
        for line in self._lines:
            series, blank, _ = line.rpartition(" ")
            if line.startswith(INFO + "{"):
                for name, value in info.items():
                    line = re.sub(rf'(?<=[{{,]){name}="[^"]*"', f'{name}="{value}"', line, count=1)
            elif blank and not line.startswith("#") and series in values:
                line = f"{series} {floatToGoString(values[series])}"  # type: ignore[no-untyped-call]
            out.append(line)
        page = "\n".join(out)
        if model_name != self.captured_model:
            page = page.replace(f'model_name="{self.captured_model}"', f'model_name="{model_name}"')
        return page.encode()
