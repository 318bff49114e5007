"""The shape of a signature: one kind of log line that we recognise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

SIZE = r"[0-9][0-9.]* ?(?:bytes|[KMGTP]i?B)"
"""A size as programs print it; KB, MB and GB are powers of 1024 in every program here."""

PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"


class Role(Enum):
    """What a line is to an incident."""

    CAUSE = "cause"  # an incident of its own
    DETAIL = "detail"  # numbers or a phase for an incident that other lines report; nothing alone
    CONSEQUENCE = "consequence"  # what follows from a cause; an incident only when no cause is near
    RETRY = "retry"  # the program tries again with less; what failed before is forgiven if that works
    PHASE = "phase"  # what the process does from here on
    START = "start"  # a new run begins here


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of line.

    *anchor* is a literal that every such line holds, as raw bytes in any wrapper: ASCII, without quotes,
    backslashes, ``<``, ``>`` and ``&``, which JSON spells differently.
    *pattern* is in the syntax of google-re2 and is searched in the message, without wrapper and prefix.
    Its named groups are fields; *fields* are constants; *units* is the unit of a number printed without one.
    *category* names a row of `categories.CATEGORIES`; *by* picks it by the value of a field instead.
    *phase* says what the process was doing, *engine* which program prints this and no other.
    A DETAIL belongs to incidents of the family of *category*, or of those in *also*.
    *weak* fields give way to those of other lines; *any_level* lines count at level INFO and DEBUG, too; *echo* names a category beside which the line says nothing new.
    """

    name: str
    anchor: str
    pattern: str
    category: str = ""
    also: tuple[str, ...] = ()
    role: Role = Role.CAUSE
    phase: str = ""
    engine: str = ""
    fields: Mapping[str, int | str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    by: tuple[str, Mapping[str, str], str] | None = None
    weak: bool = False
    any_level: bool = False
    echo: str = ""
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()
