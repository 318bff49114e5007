"""`make eval-incidents`: precision and recall of the incident classifier, per category, over the corpus in `tests/corpus`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_oom_exporter.analysis.incidents import Classifier, Format
from gpu_oom_exporter.model import Incident

CORPUS = Path(__file__).parent / "corpus" / "incidents"
PRECISION, RECALL, FIELDS = 0.99, 0.97, 0.97


@dataclass
class Score:
    """Counts of one category."""

    found: int = 0
    missed: int = 0
    wrong: int = 0
    fields: int = 0
    fields_right: int = 0

    @property
    def precision(self) -> float:
        return self.found / (self.found + self.wrong) if self.found + self.wrong else 1.0

    @property
    def recall(self) -> float:
        return self.found / (self.found + self.missed) if self.found + self.missed else 1.0

    @property
    def fields_ratio(self) -> float:
        return self.fields_right / self.fields if self.fields else 1.0


@dataclass
class Result:
    """Scores by category, what went wrong in words, and how many negatives raised an alarm."""

    scores: dict[str, Score] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    negatives: int = 0
    false_alarms: int = 0

    def score(self, category: str) -> Score:
        return self.scores.setdefault(category, Score())

    @property
    def total(self) -> Score:
        total = Score()
        for score in self.scores.values():
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(score, name))
        return total

    @property
    def good(self) -> bool:
        total = self.total
        reached = total.precision >= PRECISION and total.recall >= RECALL and total.fields_ratio >= FIELDS
        return reached and not self.false_alarms


def cases(path: Path = CORPUS / "cases.jsonl") -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def classify(data: bytes, chosen: Format = Format.AUTO, chunk: int = 1 << 18) -> list[Incident]:
    classifier = Classifier(chosen)
    found: list[Incident] = []
    for at in range(0, len(data), chunk):
        found += classifier.feed(data[at : at + chunk])
    return found + classifier.close()


def text(case: dict[str, Any]) -> bytes:
    return ("\n".join(case["lines"]) + "\n").encode()


def agree(wanted: Any, got: Any) -> bool:
    """Numbers within 0.5 %, lists in order, everything else equal."""
    if isinstance(wanted, bool) or not isinstance(wanted, int | float | list | dict):
        return bool(wanted == got)
    if isinstance(wanted, list):
        return isinstance(got, list | tuple) and len(wanted) == len(got) and all(map(agree, wanted, got))
    if isinstance(wanted, dict):
        return isinstance(got, dict) and all(name in got and agree(value, got[name]) for name, value in wanted.items())
    return isinstance(got, int | float) and abs(wanted - got) <= (0.005 * abs(wanted) if abs(wanted) > 4096 else 0)


def judge(case: dict[str, Any], got: Iterable[Incident], result: Result) -> None:
    left = list(got)
    for wanted in case["expected"]:
        score = result.score(wanted["category"])
        same = [incident for incident in left if incident.category == wanted["category"]]
        if not same:
            score.missed += 1
            result.problems.append(f"{case['id']}: missed {wanted['category']}")
            continue
        fields = wanted["fields"]
        best = max(same, key=lambda i: sum(name in i.fields and agree(v, i.fields[name]) for name, v in fields.items()))
        left.remove(best)
        score.found += 1
        for name, value in fields.items():
            score.fields += 1
            if name in best.fields and agree(value, best.fields[name]):
                score.fields_right += 1
            else:
                result.problems.append(
                    f"{case['id']}: {wanted['category']}.{name} is {best.fields.get(name)}, not {value}"
                )
    for incident in left:
        result.score(incident.category).wrong += 1
        result.problems.append(f"{case['id']}: {incident.category} that is not there")
    if not case["expected"]:
        result.negatives += 1
        result.false_alarms += bool(left)


def evaluate(paths: Iterable[Path]) -> Result:
    result = Result()
    for path in paths:
        for case in cases(path):
            judge(case, classify(text(case)), result)
    return result


def main(arguments: list[str]) -> int:
    result = evaluate([Path(name) for name in arguments] or sorted(CORPUS.glob("*.jsonl")))
    table = Table(box=None)
    for column in ("category", "found", "missed", "wrong", "precision", "recall", "fields"):
        table.add_column(column, justify="left" if column == "category" else "right", no_wrap=True)
    rows = [*sorted(result.scores.items()), ("ALL", result.total)]
    for name, s in rows:
        fields = f"{s.fields_right}/{s.fields}"
        table.add_row(name, str(s.found), str(s.missed), str(s.wrong), f"{s.precision:.3f}", f"{s.recall:.3f}", fields)
    console = Console(highlight=False, width=110)
    console.print(table)
    total = result.total
    console.print(
        f"fields {total.fields_ratio:.3f}; {result.false_alarms} false alarms on {result.negatives} negatives"
    )
    console.print(
        f"targets: precision >= {PRECISION}, recall >= {RECALL}, fields >= {FIELDS}, no false alarm on a negative"
    )
    for problem in result.problems:
        console.print(problem)
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
