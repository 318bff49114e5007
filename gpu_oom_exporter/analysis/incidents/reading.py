"""What does one line claim? Signatures, fields in base units, and whether it is the program that speaks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from gpu_oom_exporter.analysis.incidents.lines import Line
from gpu_oom_exporter.analysis.incidents.voice import overcome, own_voice, own_words
from gpu_oom_exporter.catalog.signatures import SIGNATURES, Role, Signature
from gpu_oom_exporter.model import Value

UNITS = {"bytes": 1, **{f"{p}{i}b": 1024**n for n, p in enumerate("kmgtp", 1) for i in ("", "i")}}
"""Unit as printed, in lower case → bytes. KB and GB are binary in every program we read."""

SIZE = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?)\.? ?([A-Za-z]*)")
LONGEST_NUMBER = 18
"""Digits of a number that a program can mean; a longer one is noise or an attack."""

LISTED = re.compile(rb"Process (\d+) has ([\d.]+ ?\w+) memory in use|this process has ([\d.]+ ?\w+) memory in use")
TEXTS = frozenset(
    {"required_cuda", "library_version", "version", "task", "process", "unit", "invoker", "worker", "runtime"}
)
ALARMS = frozenset({Role.CAUSE, Role.CONSEQUENCE, Role.RETRY})
"""Roles that a line of a quiet level cannot have."""

LOWER = frozenset({"mode", "library"})


@dataclass(frozen=True, slots=True)
class Claim:
    """One signature that a line matches, with its fields."""

    signature: Signature
    fields: Mapping[str, Value]

    @property
    def category(self) -> str:
        """The category this line alone stands for; empty for one that only adds to others."""
        if self.signature.by is None:
            return self.signature.category
        field, table, other = self.signature.by
        return table.get(str(self.fields.get(field)), other)


@dataclass(frozen=True, slots=True)
class _Compiled:
    signature: Signature
    pattern: Any
    names: tuple[tuple[str, int], ...]


def _compile(signature: Signature) -> _Compiled:
    pattern = re2.compile(signature.pattern.encode())
    return _Compiled(signature, pattern, tuple((name.decode(), index) for name, index in pattern.groupindex.items()))


def _anchor_set() -> tuple[Any, list[list[_Compiled]]]:
    by_anchor: dict[str, list[_Compiled]] = {}
    for signature in SIGNATURES:
        by_anchor.setdefault(signature.anchor, []).append(_compile(signature))
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    found = re2.Set.SearchSet(options)
    for anchor in by_anchor:
        found.Add(re2.escape(anchor).encode())
    found.Compile()
    return found, list(by_anchor.values())


ANCHOR_SET, BY_ANCHOR = _anchor_set()

REMEMBERED_BYTES = 4096
"""Longer messages are not remembered, which bounds the memory for it."""


def claims(line: Line) -> tuple[Claim, ...]:
    """Every signature that *line* matches in the program's own voice."""
    read = _remembered if len(line.text) <= REMEMBERED_BYTES else _claims
    return read(line.text, line.indent, line.speaker.level)


def _claims(text: bytes, indent: int, level: str) -> tuple[Claim, ...]:
    indexes = ANCHOR_SET.Match(b" " * indent + text if indent > 16 else text)
    if not indexes:
        return ()
    if text[:1] == b"{":
        own = own_words(text)
        if own is None:
            return ()
        if own[0] is not text:
            return _claims(own[0], 0, own[1])
    found = []
    for index in indexes:
        for compiled in BY_ANCHOR[index]:
            signature = compiled.signature
            match = compiled.pattern.search(text)
            if match is None or not own_voice(text, indent, match.start(), level):
                continue
            if signature.role in ALARMS and not signature.any_level:
                survivable = signature.category.startswith("cuda_oom_") or signature.category == "gpu_kernel_smem_limit"
                if overcome(text, match.start(), match.end(), level, survivable):
                    continue
            found.append(Claim(signature, read_fields(compiled, match)))
    return tuple(found)


_remembered = lru_cache(maxsize=256)(_claims)
"""An error that repeats is read once: storms print the same message with another time."""


def read_fields(compiled: _Compiled, match: Any) -> dict[str, Value]:
    """The named groups of *match* in base units; what is unknown is absent."""
    signature = compiled.signature
    fields: dict[str, Value] = dict(signature.fields)
    for name, index in compiled.names:
        raw = match.group(index)
        if not raw:
            continue
        if name == "processes":
            _read_processes(raw, fields)
        else:
            value = convert(name, raw.decode("utf-8", "replace"), signature.units.get(name, ""))
            if value is not None:
                fields[name] = value
    reserved, allocated = fields.pop("reserved_bytes", None), fields.get("allocated_bytes")
    if isinstance(reserved, int) and isinstance(allocated, int):
        fields["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    return fields


def _read_processes(raw: bytes, fields: dict[str, Value]) -> None:
    listed = []
    for pid, used, own in LISTED.findall(raw):
        if own:
            if (own_bytes := size(own.decode())) is not None:
                fields["process_bytes"] = own_bytes
        else:
            number, bytes_used = convert("pid", pid.decode(), ""), size(used.decode())
            if isinstance(number, int) and bytes_used is not None:
                listed.append({"pid": number, "used_bytes": bytes_used})
    if listed:
        fields["listed_processes"] = listed


def convert(name: str, text: str, unit: str) -> Value | None:
    """The value of field *name* printed as *text*; ``None`` when it says that it is unknown."""
    if name.endswith("_bytes"):
        return size(text, unit)
    if name == "pci":
        return pci(text)
    if name in TEXTS:
        return text
    if name == "gpu_memory_utilization":
        return float(text) if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", text) else None
    if name in LOWER:
        return text.lower()
    if text.startswith("<"):
        return None
    if re.fullmatch(r"-?[0-9]+", text) is None:
        return text
    return int(text) if len(text) <= LONGEST_NUMBER else None


def size(text: str, unit: str = "") -> int | None:
    """*text* such as ``12.81 MiB`` in bytes, of *unit* (or bytes) where it prints none; ``None`` when it is no size."""
    match = SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > LONGEST_NUMBER:
        return None
    number, printed = match[1].replace(",", ""), (match[2] or unit or "bytes").lower()
    return round(float(number) * UNITS[printed]) if printed in UNITS else None


def pci(text: str) -> str:
    """A PCI address as ``0000:c1:00``: four digits of domain, lower case, no function."""
    domain, bus, device = text.lower().partition(".")[0].split(":")
    return f"{domain[-4:]}:{bus}:{device}"
