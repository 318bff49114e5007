"""What is remembered between ticks, in bounded memory: sliding minima and shares of time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gpu_oom_exporter.model import MemoryKind, Ownership, Place, Workload

HEADROOM_SECONDS = 60.0
"""Window of `vram_headroom_min_bytes`: what reading every second is for, at scrapes of up to a minute."""

SERVING_SECONDS = 300.0
"""Window of `serving_headroom_min_bytes` (`design.md` §2)."""

STARVED_SECONDS = 600.0
"""Window of `kv_cache_starved_ratio` (`design.md` §2)."""

RANK_SAMPLES = 1024
"""Polls remembered per rank: 10 minutes at the fastest sensible period."""


class SlidingMin:
    """The smallest value of the last *seconds*; amortised constant time per value."""

    __slots__ = ("_values", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._values: deque[tuple[float, int]] = deque()

    def add(self, mono: float, value: int) -> int:
        """Remember *value* at *mono* and return the minimum over the window."""
        values = self._values
        while values and values[-1][1] >= value:
            values.pop()
        values.append((mono, value))
        while values[0][0] < mono - self.seconds:
            values.popleft()
        return values[0][1]


class ShareOfTime:
    """Which share of the last *seconds* a claim held, each poll standing for the time since the one before."""

    __slots__ = ("_samples", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, bool]] = deque(maxlen=RANK_SAMPLES)

    def add(self, mono: float, held: bool) -> None:
        """Remember that the claim *held* between the sample before and *mono*."""
        self._samples.append((mono, held))
        while self._samples[0][0] < mono - self.seconds:
            self._samples.popleft()

    def ratio(self) -> float | None:
        """0..1 over what is remembered; None before there are two samples."""
        if len(self._samples) < 2:
            return None
        span = self._samples[-1][0] - self._samples[0][0]
        held = 0.0
        before = self._samples[0][0]
        for mono, claim in list(self._samples)[1:]:
            held += (mono - before) if claim else 0.0
            before = mono
        return held / span if span > 0 else None


@dataclass(slots=True)
class RankHistory:
    """What is remembered of one rank of one engine."""

    starved: ShareOfTime = field(default_factory=lambda: ShareOfTime(STARVED_SECONDS))
    preemptions: int | None = None
    seen: object = None


@dataclass(slots=True)
class Sighting:
    """Since when a process has been under suspicion without a break."""

    since: float


@dataclass(slots=True)
class Residents:
    """Who was on a place when its engine became ready, by (PID, start)."""

    since: float
    pids: set[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Deceased:
    """An engine's process whose end was watched, and what it held."""

    pid: int
    comm: str
    used_bytes: int
    mono: float


@dataclass(slots=True)
class History:
    """The daemon's memory. Only `think` adds to it, once per new reading."""

    headroom: dict[Place, SlidingMin] = field(default_factory=dict)
    serving: dict[Place, SlidingMin] = field(default_factory=dict)
    ranks: dict[tuple[str, str], RankHistory] = field(default_factory=dict)
    gap_readings: dict[tuple[Place, str], int] = field(default_factory=dict)
    served: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Engine → (PID, start) of the processes that listened on its port when it last answered."""
    versions: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, MemoryKind] = field(default_factory=dict)
    """UUID → the last memory kind that was told: an info label does not change because a GPU is lost."""
    models: dict[str, str] = field(default_factory=dict)
    """Engine → its last known model name: a label that comes and goes would split the series of one engine."""
    commands: set[tuple[Place, str, Workload, str]] = field(default_factory=set)
    sightings: dict[tuple[str, str, int, int], Sighting] = field(default_factory=dict)
    workers: dict[tuple[int, int], str] = field(default_factory=dict)
    """(PID, start) of a process that was seen under an API server → the engine's kind."""
    active: dict[tuple[int, int], float] = field(default_factory=dict)
    """(PID, start) of a process on a GPU → when it was last seen to compute, or first seen."""
    arrived: dict[tuple[int, int], float] = field(default_factory=dict)
    """(PID, start) of a process on a GPU → when it was first seen there."""
    residents: dict[Place, Residents] = field(default_factory=dict)
    engines: dict[Place, dict[int, tuple[str, int]]] = field(default_factory=dict)
    """Place → PID of an engine's process → its command and bytes at the last reading."""
    deceased: dict[Place, deque[Deceased]] = field(default_factory=dict)
    kept: dict[Place, tuple[Ownership, int]] = field(default_factory=dict)
    """The last judged ownership of a place, and how many incomplete readings it has survived."""
    blind: int = 0
    """How many ticks in a row had no reading of NVML."""
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """PCI address → (index, UUID) of every GPU that NVML has listed in this life."""
