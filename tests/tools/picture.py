"""Draw docs/picture.svg from the demo's own page: `.venv/bin/python -m tests.tools.picture` (by hand)."""

from __future__ import annotations

import asyncio
from html import escape
from pathlib import Path

from gpu_oom_exporter.daemon import Daemon, World
from gpu_oom_exporter.model import Holder, Report
from gpu_oom_exporter.simulate.host import demo_config, demo_sources
from tests.conftest import GIB, ManualClock

MOMENT_SECONDS = 75.0
"""The top of the first burst of requests."""

COLOURS = {
    Holder.ENGINE: "#3f7fbf",
    Holder.PROCESS: "#8a6bbf",
    Holder.GRAPHICS: "#4fa36b",
    Holder.UNATTRIBUTED: "#9a9a9a",
}
FREE, KV = "#e6e9ee", "#d98324"
LEFT, WIDE, ROW = 150, 560, 62


async def report() -> Report:
    clock = ManualClock()
    sources, fetch = demo_sources(clock)
    daemon = Daemon(World(sources, clock, fetch), demo_config())
    while clock.now <= 1000.0 + MOMENT_SECONDS:
        for source in sources:
            await daemon.board.read_once(source)
        daemon.tick()
        clock.advance(5.0)
    assert daemon.state.report is not None
    return daemon.state.report


def text(x: float, y: float, words: str, size: int = 13, colour: str = "#1d2430", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}" fill="{colour}"/>'


def draw(told: Report) -> str:
    height = 70 + ROW * len(told.headroom)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="system-ui,sans-serif" role="img" '
        'aria-label="Four GPUs: who holds the memory, what is left, and how full the KV caches are">',
        bar(0, 0, 960, height, "#ffffff"),
    ]
    x = LEFT
    for words, colour in [("engine", COLOURS[Holder.ENGINE]), ("process", COLOURS[Holder.PROCESS]),
                          ("graphics", COLOURS[Holder.GRAPHICS]), ("free", FREE), ("KV cache in use", KV)]:  # fmt: skip
        out += [bar(x, 16, 12, 12, colour), text(x + 18, 27, words, 12)]
        x += 44 + 7 * len(words)
    engines = {place: engine for engine in told.engines for place in engine.places}
    for at, (place, room) in enumerate(told.headroom.items()):
        y = 48 + ROW * at
        total = room.total_bytes or 1
        out.append(text(20, y + 18, f"GPU {place.gpu}", 14))
        x = LEFT
        for holder, used in (told.ownership[place].held or {}).items():
            if used and holder in COLOURS:
                out.append(bar(x, y, WIDE * used / total, 24, COLOURS[holder]))
                x += WIDE * used / total
        reserved = WIDE * (room.reserved_bytes or 0) / total
        out.append(bar(x, y, LEFT + WIDE - reserved - x, 24, FREE))
        out.append(text(LEFT + WIDE + 14, y + 17, f"{(room.headroom_bytes or 0) / GIB:.1f} GiB headroom"))
        engine = engines.get(place)
        if engine is not None and engine.ranks:
            ratio = engine.ranks[0].kv_used_ratio or 0.0
            out += [bar(LEFT, y + 28, WIDE, 8, FREE), bar(LEFT, y + 28, WIDE * ratio, 8, KV)]
            out.append(text(LEFT + WIDE + 14, y + 38, f"{engine.name}: KV cache {ratio:.0%}", 12))
        else:
            names = sorted({h.comm for h in told.ownership[place].holdings if h.used_bytes > GIB})
            out.append(text(LEFT + WIDE + 14, y + 38, f"held by {', '.join(names)}", 12))
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    Path("docs/picture.svg").write_text(draw(asyncio.run(report())))
