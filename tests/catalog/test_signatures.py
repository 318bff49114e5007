"""Every signature claims its own examples alone, and nothing that only looks like it."""

from __future__ import annotations

import pytest
import re2

from gpu_oom_exporter.analysis.incidents.judging import INTERNAL
from gpu_oom_exporter.analysis.incidents.lines import unwrap
from gpu_oom_exporter.analysis.incidents.reading import claims
from gpu_oom_exporter.catalog.categories import CATEGORIES, FIELDS
from gpu_oom_exporter.catalog.signatures import FRAMES, PHASE_CATEGORY, SIGNATURES, Role, Signature
from tests.eval_incidents import classify


def names(line: str) -> list[str]:
    found = unwrap(line.encode())
    return [claim.signature.name for claim in claims(found)]


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_examples(signature: Signature) -> None:
    """An example is claimed by its signature and by no other."""
    assert signature.examples, "a signature needs an example"
    for example in signature.examples:
        assert [signature.name] == names(example), example


@pytest.mark.parametrize("signature", [s for s in SIGNATURES if s.near_misses], ids=lambda s: s.name)
def test_near_misses(signature: Signature) -> None:
    """A near miss is not claimed."""
    for near_miss in signature.near_misses:
        assert signature.name not in names(near_miss), near_miss


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_anchor(signature: Signature) -> None:
    """An anchor stands in every example and survives JSON: ASCII, no quotes, backslashes or angle brackets."""
    assert signature.anchor.isascii()
    assert len(signature.anchor) >= 5
    assert not set(signature.anchor) & set('"\\<>&\n')
    assert all(signature.anchor in example for example in signature.examples)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_bounded(signature: Signature) -> None:
    """A pattern compiles under google-re2, which is linear in the text, to a program of bounded size."""
    assert re2.compile(signature.pattern.encode()).programsize < 5000


def test_names() -> None:
    """Names are unique, categories exist, and every alarm has one."""
    assert len(SIGNATURES) == len({s.name for s in SIGNATURES})
    for signature in SIGNATURES:
        used = (
            [signature.category, *signature.also]
            if signature.by is None
            else [*signature.by[1].values(), signature.by[2]]
        )
        assert all(not name or name in CATEGORIES for name in used), signature.name
        if signature.role in (Role.CAUSE, Role.CONSEQUENCE, Role.RETRY):
            assert any(used), signature.name


def test_fields_are_documented() -> None:
    """Every field that a signature reads is in the documentation, or only helps to judge."""
    documented = {name for names in FIELDS for name in names.split(", ")}
    read_apart = {"processes", "reserved_bytes"}
    for signature in SIGNATURES:
        groups = {name.decode() for name in re2.compile(signature.pattern.encode()).groupindex}
        assert groups | set(signature.fields) <= documented | INTERNAL | read_apart, signature.name


def test_phases() -> None:
    """Every phase that frames or lines can say has a category, or is one of the two without."""
    said = {phase for phase, _ in FRAMES} | {s.phase for s in SIGNATURES if s.phase}
    assert set(PHASE_CATEGORY) | {"runtime", "none"} == said | {"none"}
    assert set(PHASE_CATEGORY.values()) <= set(CATEGORIES)
    for _, pattern in FRAMES:
        re2.compile(pattern.encode())


@pytest.mark.parametrize(
    "signature", [s for s in SIGNATURES if s.role is Role.DETAIL or s.role is Role.PHASE], ids=lambda s: s.name
)
def test_details_alone(signature: Signature) -> None:
    """A detail or a phase without an incident is nothing."""
    for example in signature.examples:
        assert classify(example.encode() + b"\n") == []
