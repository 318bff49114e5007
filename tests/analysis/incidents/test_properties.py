"""What must not change a verdict: numbers, units, prefixes, wrappers, interleaving, chunk boundaries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_oom_exporter.analysis.incidents import Classifier
from gpu_oom_exporter.model import Incident
from tests.eval_incidents import CORPUS, agree, cases, classify

CASES = [
    case
    for path in sorted(CORPUS.glob("*.jsonl"))
    for case in cases(path)
    if case["input_kind"] == "log" and case["format"] in ("plain", "kernel") and case["expected"]
]
ISO = "2026-03-04T05:06:07.100000123Z"
ORDINARY = (
    'INFO:     10.0.0.7:51514 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    '(APIServer pid=1) INFO:     10.0.0.8:40000 - "GET /health HTTP/1.1" 200 OK',
    "",
    "INFO 07-15 10:00:01 [logger.py:43] Received request chatcmpl-2: prompt: 'how wide is a 24\" screen', params: S(n=1)",
    "Received request chatcmpl-1: prompt: 'why do I get CUDA out of memory. Tried to allocate 2.00 GiB?', params: SamplingParams(n=1)",
)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

Draw = Callable[[st.SearchStrategy[Any]], Any]


def verdict(found: list[Incident]) -> list[tuple[str, dict[str, Any]]]:
    return [(incident.category, dict(incident.fields)) for incident in found]


def same(case: dict[str, Any], found: list[Incident]) -> None:
    """The expected categories and fields, and nothing more."""
    assert sorted(wanted["category"] for wanted in case["expected"]) == sorted(incident.category for incident in found)
    for wanted in case["expected"]:
        named = [i for i in found if i.category == wanted["category"]]
        assert any(all(agree(v, i.fields.get(n)) for n, v in wanted["fields"].items()) for i in named), (wanted, named)


def docker(lines: list[str], draw: Draw) -> list[str]:
    """The json-file driver, which splits a line into pieces anywhere."""
    wrapped = []
    for line in lines:
        cuts = sorted(draw(st.lists(st.integers(0, len(line)), max_size=2)))
        parts = [line[a:b] for a, b in zip([0, *cuts], [*cuts, len(line)], strict=True)]
        parts[-1] += "\n"
        compact = draw(st.booleans())
        for part in parts:
            record = {"log": part, "stream": "stderr", "time": ISO}
            wrapped.append(
                json.dumps(record, separators=(",", ":") if compact else None, ensure_ascii=draw(st.booleans()))
            )
    return wrapped


def cri(lines: list[str], draw: Draw) -> list[str]:
    """containerd: P for a piece, F for the last one."""
    wrapped = []
    for line in lines:
        cuts = sorted(draw(st.lists(st.integers(0, len(line)), max_size=2)))
        parts = [line[a:b] for a, b in zip([0, *cuts], [*cuts, len(line)], strict=True)]
        wrapped += [f"{ISO} stderr P {part}" for part in parts[:-1]]
        wrapped.append(f"{ISO} stderr F {parts[-1]}")
    return wrapped


def journal(lines: list[str], draw: Draw) -> list[str]:
    wrapped = []
    for line in lines:
        message: Any = list(line.encode()) if draw(st.booleans()) else line
        wrapped.append(
            json.dumps(
                {
                    "__REALTIME_TIMESTAMP": "1767225600000000",
                    "_PID": "77",
                    "SYSLOG_IDENTIFIER": "app",
                    "MESSAGE": message,
                }
            )
        )
    return wrapped


def compose(lines: list[str], draw: Draw) -> list[str]:
    name = draw(st.sampled_from(["vllm-1", "llm_api", "tgi"]))
    return [f"{name}  | {line}" for line in lines]


def kubectl(lines: list[str], draw: Draw) -> list[str]:
    return [f"[pod/vllm-7d9f-x2x/vllm] {line}" for line in lines]


def coloured(lines: list[str], draw: Draw) -> list[str]:
    return [re.sub(r"^(\(\w+ [^)]*\))", "\x1b[1;36m\\1\x1b[0;0m", line) for line in lines]


def windows(lines: list[str], draw: Draw) -> list[str]:
    return [f"{line}\r" for line in lines]


def plain(lines: list[str], draw: Draw) -> list[str]:
    return lines


WRAPPERS = (plain, docker, cri, journal, compose, kubectl, coloured, windows)
KERNEL_WRAPPERS = (plain, docker, windows)


@QUICK
@given(st.data())
def test_wrappers(data: st.DataObject) -> None:
    """A wrapper changes nothing but what it adds about the writer."""
    case = data.draw(st.sampled_from(CASES))
    wrap = data.draw(st.sampled_from(KERNEL_WRAPPERS if case["format"] == "kernel" else WRAPPERS))
    same(case, classify("\n".join(wrap(case["lines"], data.draw)).encode() + b"\n"))


@QUICK
@given(st.data())
def test_chunks(data: st.DataObject) -> None:
    """Where chunks end changes nothing."""
    case = data.draw(st.sampled_from(CASES))
    text = ("\n".join(case["lines"]) + "\n").encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    classifier = Classifier()
    found: list[Incident] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += classifier.feed(text[start:end])
    assert verdict(classify(text)) == verdict(found + classifier.close())


@QUICK
@given(st.data())
def test_interleaving(data: st.DataObject) -> None:
    """Ordinary lines of others in between change nothing but line numbers."""
    case = data.draw(st.sampled_from([c for c in CASES if c["format"] == "plain" and len(c["lines"]) < 40]))
    lines: list[str] = []
    for line in case["lines"]:
        lines += [*data.draw(st.lists(st.sampled_from(ORDINARY), max_size=3)), line]
    same(case, classify("\n".join(lines).encode() + b"\n"))


def pretty(count: int) -> str:
    """Bytes as PyTorch prints them (`format_size`)."""
    if count <= 1024:
        return f"{count} bytes"
    for unit, scale in (("KiB", 2**10), ("MiB", 2**20)):
        if count <= scale * 1024:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 2**30:.2f} GiB"


SIZES = st.one_of(st.integers(0, 4096), st.integers(0, 2**30), st.integers(2**30, 2**38))


@QUICK
@given(st.data())
def test_allocator_numbers(data: st.DataObject) -> None:
    """Every figure of the allocator's text comes back, whatever its unit, in both layouts."""
    draw = data.draw
    tried, total, free, live, slack = (draw(SIZES) for _ in range(5))
    gpu, pool = draw(st.integers(0, 15)), draw(st.one_of(st.none(), SIZES))
    others = draw(st.lists(st.tuples(st.integers(1, 4_000_000), SIZES), max_size=3))
    own = draw(st.one_of(st.none(), SIZES))
    wanted: dict[str, Any] = {
        "tried_bytes": tried,
        "gpu": gpu,
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": live,
    }
    if draw(st.booleans()):
        text = (
            f"CUDA out of memory. Tried to allocate {pretty(tried)}. GPU {gpu} has a total {draw(st.sampled_from(['capacity', 'capacty']))} "
            f"of {pretty(total)} of which {pretty(free)} is free. "
            + "".join(f"Process {p} has {pretty(n)} memory in use. " for p, n in others)
        )
        if own is not None:
            text += f"Including non-PyTorch memory, this process has {pretty(own)} memory in use. "
            wanted["process_bytes"] = own
        text += f"Of the allocated memory {pretty(live)} is allocated by PyTorch, "
        if pool is not None:
            text += f"with {pretty(pool)} allocated in private pools (e.g., CUDA Graphs), "
            wanted["private_pool_bytes"] = pool
        text += f"and {pretty(slack)} is reserved by PyTorch but unallocated."
        wanted["reserved_unallocated_bytes"] = slack
        if others:
            wanted["listed_processes"] = [{"pid": p, "used_bytes": n} for p, n in others]
    else:
        text = (
            f"CUDA out of memory. Tried to allocate {pretty(tried)} (GPU {gpu}; {pretty(total)} total capacity; {pretty(live)} already "
            f"allocated; {pretty(free)} free; {pretty(live + slack)} reserved in total by PyTorch) If reserved memory is >> allocated"
        )
    name = draw(st.sampled_from(["torch.OutOfMemoryError: ", "torch.cuda.OutOfMemoryError: ", "RuntimeError: ", ""]))
    (incident,) = classify(f"{name}{text}\n".encode())
    assert incident.category.startswith("cuda_oom_")
    for field, value in wanted.items():
        got: Any = incident.fields[field]
        if field == "listed_processes":
            assert [p["pid"] for p in value] == [p["pid"] for p in got]
            assert all(close(a["used_bytes"], b["used_bytes"]) for a, b in zip(value, got, strict=True))
        else:
            assert close(value, got), (field, value, got)


def close(exact: int, printed: int) -> bool:
    """Two decimals of the printed unit are all that the text holds."""
    unit = next((scale for scale in (2**30, 2**20, 2**10) if exact > scale * 0.99), 1)
    return abs(exact - printed) <= unit * 0.0051 + 1


PREFIXES = (
    ("", None),
    ("ERROR 12-16 21:40:15 engine.py:135] ", None),
    ("(RayWorkerWrapper pid={pid}, ip=10.1.2.3) ERROR 12-16 21:40:15 [worker_base.py:157] ", "pid"),
    ("(VllmWorkerProcess pid={pid}) ERROR 04-06 20:46:48 [multiproc_worker_utils.py:238] ", "pid"),
    ("(VllmWorker rank=1 pid={pid}) ERROR 07-07 15:19:48 [multiproc_executor.py:492] ", "pid"),
    ("(EngineCore_DP0 pid={pid}) ERROR 11-14 15:11:23 [v1/engine/core.py:845] ", "pid"),
    ("(Worker_DP1_TP1_EP3 pid={pid}) ", "pid"),
    ("(EngineCore pid={pid}) ", "pid"),
    ("[2026-02-24T20:21:58Z] (EngineCore_DP0 pid={pid}) ERROR 02-24 20:21:58 [core.py:1] ", "pid"),
    ("[rank0]: ", None),
    ("[2025-04-11 09:20:41 DP7 TP7] ", None),
    ("vllm-1  | \x1b[1;36m(EngineCore pid={pid})\x1b[0;0m ERROR 01-01 00:00:00 [core.py:1] ", "pid"),
)
ERRORS = tuple(
    case["lines"][0] for case in CASES
    if len(case["lines"]) == 1 and re.match(r"[\w.]*(?:Error|Exception): ", case["lines"][0])
)  # fmt: skip


@QUICK
@given(st.sampled_from(ERRORS), st.sampled_from(PREFIXES), st.integers(1, 4_000_000))
def test_prefixes(line: str, prefix: tuple[str, str | None], pid: int) -> None:
    """The same error behind the prefix of any version is the same incident, with the prefix's PID."""
    before = classify(line.encode() + b"\n")
    after = classify(prefix[0].format(pid=pid).encode() + line.encode() + b"\n")
    assert [i.category for i in before] == [i.category for i in after]
    if prefix[1]:
        assert {pid} == {i.fields["pid"] for i in after}


@QUICK
@given(
    st.lists(
        st.one_of(st.binary(max_size=80), st.sampled_from([line.encode() for c in CASES for line in c["lines"]])),
        max_size=30,
    )
)
def test_anything(parts: list[bytes]) -> None:
    """Any bytes between any lines raise nothing, and chunks do not matter."""
    data = b"\n".join(parts)
    assert verdict(classify(data)) == verdict(classify(data, chunk=17))
