"""`holders`: who holds the memory of each GPU, with verdict and evidence; `--watch` is the same live."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpu_oom_exporter.analysis import State, think
from gpu_oom_exporter.catalog.remedies import SEE, remedies
from gpu_oom_exporter.cli import OK, PROBLEM, Misuse, load_config, logs, paths
from gpu_oom_exporter.config import Config
from gpu_oom_exporter.daemon import World, simulated_host, this_host
from gpu_oom_exporter.model import Cause, Holder, Holding, Place, Report
from gpu_oom_exporter.sources.board import Board
from gpu_oom_exporter.sources.openers import Openers

GROWTH_SECONDS = 300.0
"""`--watch` shows growth over up to this long."""


def run(arguments: argparse.Namespace) -> int:
    """Read twice and print; exit 1 when an orphan was found or nothing could be read."""
    chosen = vars(arguments)
    config = load_config(chosen["config.file"])
    seconds = chosen["confirm_seconds"]
    if not 0 <= seconds <= 3600:
        raise Misuse(f"--confirm-seconds: {seconds:g} is not between 0 and 3600")
    logs.set_up("error", chosen["log.format"])
    world = this_host(config, paths(arguments))
    if arguments.demo:
        world, config = simulated_host(1.0)
    if arguments.watch:
        try:
            return asyncio.run(_watch(Look(world, config, seconds), arguments.gpu))
        except KeyboardInterrupt:
            return OK
    report = asyncio.run(_look_twice(Look(world, config, seconds)))
    if report is None or not readable(report):
        return _nothing(report, arguments.output)
    places = chosen_places(report, arguments.gpu)
    opened = {} if arguments.demo else Openers(chosen["path.procfs"]).scan(0.0)
    if arguments.output == "json":
        print(json.dumps({"gpus": [as_json(report, place, opened) for place in places]}))
    else:
        console = Console(highlight=False)
        for place in places:
            console.print(table(report, place, opened, {}))
        for line in blind_spots(report):
            console.print(Text(line, style="yellow"))
    found = any(h.cause is not None for place in places for h in report.ownership[place].holdings)
    return PROBLEM if found else OK


class Look:
    """Reads a world and thinks about it, with an orphan's time replaced by a person's patience."""

    def __init__(self, world: World, config: Config, confirm_seconds: float) -> None:
        self.world = world
        self.config = config
        self.board = Board(world.sources, world.clock)
        self.state = State()
        self.confirm_seconds = dict.fromkeys(Cause, confirm_seconds)

    async def once(self) -> Report | None:
        """One reading of every source."""
        await asyncio.gather(*(self.board.read_once(source) for source in self.world.sources))
        self.state = think(self.board.snapshot(), self.state, self.config, self.confirm_seconds)
        return self.state.report

    async def close(self) -> None:
        """Let go of everything."""
        await asyncio.gather(*(source.close() for source in self.world.sources))
        if self.world.fetch is not None:
            await self.world.fetch.close()


async def _look_twice(look: Look) -> Report | None:
    try:
        await look.once()
        await look.world.clock.sleep(next(iter(look.confirm_seconds.values())))
        return await look.once()
    finally:
        await look.close()


def readable(report: Report) -> bool:
    """Whether NVML was read just now, and has a GPU."""
    health = report.health.get("nvml")
    return bool(report.ownership) and health is not None and health.ok


def _nothing(report: Report | None, output: str) -> int:
    health = report.health.get("nvml") if report is not None else None
    if output == "json":
        print(json.dumps({"gpus": []}))
    console = Console(stderr=True, highlight=False)
    if health is not None and not health.ok:
        console.print(f"No GPU can be read: {health.detail} ({health.reason}).", soft_wrap=True)
        return PROBLEM
    console.print("No GPU was found.")
    return OK


def chosen_places(report: Report, wanted: str | None) -> list[Place]:
    """The places of *wanted* (index, UUID or PCI address), or all of them."""
    everything = list(report.ownership)
    if wanted is None:
        return everything
    address = {gpu.pci_bus_id.lower(): gpu.place.uuid for gpu in report.gpus}
    uuid = next((u for a, u in address.items() if a.endswith(wanted.lower()) and len(wanted) >= 7), wanted)
    found = [place for place in everything if place.gpu == wanted or place.uuid == uuid]
    if not found:
        known = ", ".join(sorted({place.gpu for place in everything}))
        raise Misuse(f"--gpu: no GPU {wanted!r} is here; there are {known}")
    return found


Opened = Mapping[int, frozenset[str]]
"""PID → NVIDIA device files it has open."""


def rows(report: Report, place: Place, opened: Opened) -> list[Holding]:
    """Who holds *place*, the most first, with what nobody could be named for as the last row.

    Its evidence names who has the GPU's device file open without being listed by NVML.
    """
    owned = report.ownership[place]
    found = sorted(owned.holdings, key=lambda h: -h.used_bytes)
    rest = (owned.held or {}).get(Holder.UNATTRIBUTED, 0)
    rest -= sum(h.used_bytes for h in found if h.holder is Holder.UNATTRIBUTED)
    if rest > 0:
        device = next((f"/dev/{gpu.device}" for gpu in report.gpus if gpu.place.uuid == place.uuid), "")
        others = sorted(pid for pid, files in opened.items() if device in files and all(h.pid != pid for h in found))
        evidence = [f"PID {pid} has {device} open, and NVML does not list it" for pid in others[:5]]
        found.append(Holding(0, "", Holder.UNATTRIBUTED, rest, evidence=tuple(evidence)))
    return found


def as_json(report: Report, place: Place, opened: Opened) -> dict[str, Any]:
    """One place in the fixed keys of the design."""
    room, owned = report.headroom.get(place), report.ownership[place]
    return {
        "gpu": place.gpu,
        "UUID": place.uuid,
        **({"GPU_I_ID": place.instance_id, "GPU_I_PROFILE": place.profile} if place.instance_id else {}),
        "total_bytes": room.total_bytes if room else None,
        "reserved_bytes": room.reserved_bytes if room else None,
        "used_bytes": room.used_bytes if room else None,
        "free_bytes": room.free_bytes if room else None,
        "attribution_complete": owned.complete and not gaps_now(report, place),
        "attribution_gaps": gaps_now(report, place),
        "holders": [
            {
                "pid": holding.pid or None,
                "comm": holding.comm or None,
                "holder": holding.holder.value,
                "cause": holding.cause.value if holding.cause else None,
                "used_bytes": holding.used_bytes,
                "container": holding.container or None,
                "evidence": list(holding.evidence),
                "remedy": remedies(holding, place.uuid),
            }
            for holding in rows(report, place, opened)
        ],
    }


def gaps_now(report: Report, place: Place) -> list[str]:
    """Why not every holder of *place* can be named; two readings are no time to confirm a gap in."""
    return sorted(gap.value for gap in report.ownership[place].seen_gaps)


def blind_spots(report: Report) -> Iterator[str]:
    """What could not be seen, why, and how to see it."""
    seen = {gap for owned in report.ownership.values() for gap in owned.seen_gaps}
    for gap in sorted(seen):
        yield f"not seen ({gap.value}): {SEE[gap]}."
    if os.geteuid() != 0:
        yield "not seen (not root): sockets of other users' processes, so no engine of theirs can be called an orphan."


def size(used: int | None) -> str:
    """Bytes for people."""
    if used is None:
        return "?"
    return f"{used / 2**30:.1f} GiB" if used >= 2**30 else f"{used / 2**20:.0f} MiB"


COLOURS = {Holder.ORPHAN: "red", Holder.UNATTRIBUTED: "yellow", Holder.SUSPENDED: "yellow", Holder.ENGINE: "cyan"}


def table(report: Report, place: Place, opened: Opened, growth: Mapping[tuple[Place, int], float]) -> RenderableType:
    """One place as a table that fits 80 columns, with evidence and remedy under it."""
    room = report.headroom.get(place)
    name = next((gpu.product_name for gpu in report.gpus if gpu.place.uuid == place.uuid), "")
    title = f"GPU {place.gpu} {place.profile} {name}".replace("  ", " ").strip()
    if room is not None:
        title += f": {size(room.used_bytes)} of {size(room.total_bytes)} used, {size(room.headroom_bytes)} headroom"
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("PID", justify="right", no_wrap=True, min_width=7)
    shown.add_column("COMMAND", no_wrap=True, min_width=15)
    shown.add_column("HOLDER", no_wrap=True, min_width=14)
    shown.add_column("MEMORY", justify="right", no_wrap=True, min_width=8)
    if growth:
        shown.add_column("PER MIN", justify="right", no_wrap=True, min_width=9)
    shown.add_column("WHERE", overflow="ellipsis", no_wrap=True)
    below: list[RenderableType] = []
    for holding in rows(report, place, opened):
        kind = holding.cause.value if holding.cause else holding.holder.value
        cells: list[str | Text] = [
            str(holding.pid or ""),
            holding.comm,
            Text(kind, style=COLOURS.get(holding.holder, "")),
            size(holding.used_bytes),
        ]
        if growth:
            change = growth.get((place, holding.pid))
            cells.append("" if change is None else f"{change / 2**20:+.0f} MiB")
        shown.add_row(*cells, holding.engine or holding.container)
        below += [Text(f"  {holding.pid or 'rest'}: {line}", style="dim") for line in holding.evidence]
        below += [Text(f"  -> {line}") for line in remedies(holding, place.uuid)]
    return Group(Text(title, style="bold"), shown, *below, Text(""))


async def _watch(look: Look, wanted: str | None) -> int:
    """Refresh every two seconds until interrupted, with each holder's growth over the last minutes."""
    seen: dict[tuple[Place, int], deque[tuple[float, int]]] = {}
    try:
        with Live(console=Console(highlight=False), refresh_per_second=2) as live:
            while True:
                report = await look.once()
                now = look.world.clock.mono()
                if report is None or not readable(report):
                    health = report.health.get("nvml") if report is not None else None
                    live.update(Text(f"No GPU can be read: {health.detail if health else 'none was found'}"))
                else:
                    growth = _growth(seen, report, now)
                    live.update(Group(*(table(report, place, {}, growth) for place in chosen_places(report, wanted))))
                await look.world.clock.sleep(2.0)
    finally:
        await look.close()


def _growth(
    seen: dict[tuple[Place, int], deque[tuple[float, int]]], report: Report, now: float
) -> dict[tuple[Place, int], float]:
    """Bytes per minute of every holder, over what was seen of the last `GROWTH_SECONDS`."""
    found = {}
    present = set()
    for place, owned in report.ownership.items():
        for holding in owned.holdings:
            key = (place, holding.pid)
            present.add(key)
            samples = seen.setdefault(key, deque())
            samples.append((now, holding.used_bytes))
            while samples[0][0] < now - GROWTH_SECONDS:
                samples.popleft()
            span = now - samples[0][0]
            found[key] = (holding.used_bytes - samples[0][1]) / span * 60.0 if span > 0 else 0.0
    for key in seen.keys() - present:
        del seen[key]
    return found
