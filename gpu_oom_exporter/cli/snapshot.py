"""`snapshot`: read everything once and print it as JSON, fit to be attached to a report of a bug.

Masking is by allow-list: a text is printed only under a key, or with a value, known to be harmless. Equal
texts get equal masks, so that the file still replays through analysis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from typing import Any

from pydantic import TypeAdapter

from gpu_oom_exporter.catalog.engines import DIALECTS
from gpu_oom_exporter.cli import OK, PROBLEM, load_config, logs, paths
from gpu_oom_exporter.daemon import World, simulated_host, this_host
from gpu_oom_exporter.model import Snapshot
from gpu_oom_exporter.sources.board import Board

ADAPTER = TypeAdapter(Snapshot)

SHOWN = frozenset(
    {"answer", "comm", "driver_version", "gaps", "kind", "memory_kind", "pci_bus_id", "profile", "rank", "reason"}
    | {"recovery_action", "state", "version"}
)
"""Keys whose texts tell nothing about a person, a model or a network."""

WORDS = frozenset(word for d in DIALECTS for launch in d.launches for word in (*launch.words, launch.port_flag)) | {""}


class Masks:
    """Gives each secret text one mask, the same every time it is met."""

    def __init__(self) -> None:
        self._masks: dict[str, str] = {}

    def of(self, text: str) -> str:
        """The mask of *text*."""
        if text not in self._masks:
            self._masks[text] = f"masked-{len(self._masks) + 1}"
        return self._masks[text]

    def apply(self, value: Any, key: str = "", parent: str = "") -> Any:
        """*value* with every text masked that is not on the allow-list."""
        if isinstance(value, dict):
            if key == "by_id":
                return {self.of(k): self.apply(v, k, key) for k, v in value.items()}
            return {k: self.apply(v, k, key) for k, v in value.items()}
        if isinstance(value, list):
            return [self.apply(v, key, parent) for v in value]
        if not isinstance(value, str) or not value:
            return value
        if key in SHOWN or (key == "name" and parent == "gpus"):
            return value
        if key == "argv" and (value in WORDS or value.isdecimal() or re.fullmatch(r"--[a-z-]+", value)):
            return value
        if key == "url":
            return re.sub(r"//[^/:]+", f"//{self.of(value)}", value) if "//127." not in value else value
        return self.of(value)


def run(arguments: argparse.Namespace) -> int:
    """Read once and print; exit 1 when a source failed."""
    chosen = vars(arguments)
    config = load_config(chosen["config.file"])
    logs.set_up("error", chosen["log.format"])
    world = simulated_host(1.0)[0] if arguments.demo else this_host(config, paths(arguments))
    snapshot = asyncio.run(_read(world))
    masked = Masks().apply(json.loads(ADAPTER.dump_json(snapshot)))
    json.dump(masked, sys.stdout, indent=None if arguments.output == "json" else 2, sort_keys=True)
    print()
    return OK if all(health.ok for health in snapshot.health.values()) else PROBLEM


async def _read(world: World) -> Snapshot:
    board = Board(world.sources, world.clock)
    try:
        await asyncio.gather(*(board.read_once(source) for source in world.sources))
        return board.snapshot()
    finally:
        await asyncio.gather(*(source.close() for source in world.sources))
        if world.fetch is not None:
            await world.fetch.close()
