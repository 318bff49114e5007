"""The corpus: every case, each read as its own format and as whatever it looks like."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_oom_exporter.analysis.incidents import Format
from tests.eval_incidents import CORPUS, Result, cases, classify, evaluate, judge, main, text

CASES = [case for path in sorted(CORPUS.glob("*.jsonl")) for case in cases(path)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
@pytest.mark.parametrize("chosen", ["auto", "format"])
def test_case(case: dict[str, Any], chosen: str) -> None:
    """Categories and fields are exactly those of the case, and nothing more."""
    result = Result()
    judge(case, classify(text(case), Format.AUTO if chosen == "auto" else Format(case["format"])), result)
    assert result.problems == []


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """The evaluation counts what it says: 113 cases, 19 of them negatives without a false alarm."""
    result = evaluate([CORPUS / "cases.jsonl"])
    assert result.good
    assert (result.negatives, result.false_alarms) == (19, 0)
    assert main([str(CORPUS / "cases.jsonl")]) == 0
    assert "ALL" in capsys.readouterr().out


def test_evaluation_can_fail() -> None:
    """A missed incident, a wrong one, a wrong field and a false alarm are each seen."""
    oom = next(case for case in CASES if case["expected"])
    result = Result()
    judge(oom, [], result)
    assert result.total.missed >= 1
    result = Result()
    judge({**oom, "expected": []}, classify(text(oom)), result)
    assert (result.false_alarms, result.good) == (1, False)
    wrong = {**oom, "expected": [{**oom["expected"][0], "fields": {"tried_bytes": 1}}]}
    result = Result()
    judge(wrong, classify(text(oom)), result)
    assert result.total.fields_right == 0


def test_all_at_once() -> None:
    """All cases in one file, each far from the next, give what they give alone."""
    alone = [
        [i.category for i in classify(text(case))]
        for case in CASES
        if case["input_kind"] == "log" and case.get("format_detail") != "export"
    ]
    gap = b"\n" + b"an ordinary line\n" * 2100
    data = b"".join(
        text(case) + gap for case in CASES if case["input_kind"] == "log" and case.get("format_detail") != "export"
    )
    together = [i.category for i in sorted(classify(data), key=lambda i: i.offset)]
    assert sorted(category for found in alone for category in found) == sorted(together)
