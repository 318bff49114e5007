"""An incident in the making: what its lines have told so far, and how near a further line must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_oom_exporter.analysis.incidents.lines import Speaker
from gpu_oom_exporter.analysis.incidents.reading import Claim
from gpu_oom_exporter.catalog.signatures import Role
from gpu_oom_exporter.model import Value

WINDOW_LINES = 2000
"""A line further away than this from an episode's last line is another incident."""

WINDOW_SECONDS = 120.0
"""The same in time, where both lines tell it: an API server reports a dead engine within seconds, Ray in a minute."""

LONGEST_LINES = 20000
"""An episode that goes on for longer is told and begun anew, so that a storm is not silence."""


YEARLESS = frozenset({"vllm", "syslog"})
YEAR_SECONDS = 366 * 86400.0
"""Stamps without a year are read in a leap year; New Year's Eve is next to New Year's Day."""


@dataclass(slots=True)
class Sighting:
    """One claimed line with what its surroundings tell: *frames* are phases seen in its traceback."""

    claim: Claim
    speaker: Speaker
    number: int
    offset: int
    clock: str = ""
    time: float | None = None
    borrowed: bool = False  # the time is that of a line above, which may be long before
    frames: Sequence[str] = ()
    standing: str = ""  # what the process was doing by its last phase line
    kind: str = ""  # of its speaker

    def __post_init__(self) -> None:
        self.kind = self.speaker.kind

    @property
    def pid(self) -> tuple[int, int | None]:
        """(how good the source is, PID): engine prefix, then message, then journald or syslog."""
        if self.speaker.pid is not None:
            return 3, self.speaker.pid
        named = self.claim.fields.get("pid")
        if isinstance(named, int):
            return 2, named
        return 1, self.speaker.reporter_pid


@dataclass(slots=True, eq=False)
class Episode:
    """An incident in the making."""

    family: str
    number: int
    offset: int
    last: int
    stream: str
    kind: str
    pid: tuple[int, int | None]
    rank: int | str | None
    node: str = ""
    times: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)
    weak: set[str] = field(default_factory=set)
    categories: list[str] = field(default_factory=list)
    phases: set[str] = field(default_factory=set)
    frames: set[str] = field(default_factory=set)
    standing: str = ""
    ranks: list[int | str] = field(default_factory=list)
    retried: bool = False
    failed_again: bool = False
    only_echoes: bool = True
    engine: str = ""
    version: str = ""
    looks: int = 0
    borrowed: bool = False
    told: bool = False
    arrived: float | None = None  # monotonic time at which its last line was settled or seen; set by `Folder.settle`
    settled_last: int = -1
    mourners: set[tuple[int | None, str]] = field(default_factory=set)  # who reported the death, with which signature

    def take(self, seen: Sighting) -> None:
        """Add one line."""
        signature = seen.claim.signature
        self.last = max(self.last, seen.number)
        if seen.time is not None:
            self.times[seen.clock] = seen.time
            self.borrowed = seen.borrowed
        if signature.role is Role.RETRY:
            self.retried, self.failed_again = True, False
        elif signature.role is Role.CAUSE and self.retried:
            self.failed_again = True
        if signature.role is not Role.DETAIL:
            self.categories.append(seen.claim.category)
            if seen.pid[1] is not None and (self.pid[1] is None or seen.pid[0] > self.pid[0]):
                self.pid = seen.pid
            rank = seen.speaker.rank if seen.speaker.rank is not None else seen.claim.fields.get("rank")
            if isinstance(rank, int | str):
                self.rank = self.rank if self.rank is not None else rank
                if rank not in self.ranks and len(self.ranks) < 1024:
                    self.ranks.append(rank)
            self.only_echoes = self.only_echoes and bool(signature.echo)
            self.standing = self.standing or seen.standing
        if signature.phase:
            self.phases.add(signature.phase)
        self.frames.update(seen.frames)
        self.engine = self.engine or signature.engine
        for name, value in seen.claim.fields.items():
            if name in ("pid", "rank", "version") and signature.role is not Role.DETAIL:
                continue
            if name not in self.fields or (name in self.weak and not signature.weak):
                self.fields[name] = value
                (self.weak.add if signature.weak else self.weak.discard)(name)

    def near(self, number: int, clock: str, time: float | None) -> bool:
        """Whether a line there is still within this episode's window."""
        if number - self.last > WINDOW_LINES or number - self.number > LONGEST_LINES:
            return False
        if self.borrowed and not self.frames:
            return True
        gap = self.gap(clock, time)
        return gap is None or gap <= WINDOW_SECONDS

    def gap(self, clock: str, time: float | None) -> float | None:
        """Seconds between this episode's last line and *time* on *clock*; ``None`` when they cannot be compared."""
        then = self.times.get(clock)
        if then is None or time is None:
            return None
        gap = abs(time - then)
        return min(gap, YEAR_SECONDS - gap) if clock in YEARLESS else gap
