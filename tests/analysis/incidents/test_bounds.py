"""State is bounded and input is never trusted: long lines, splits, binary, storms, chunk boundaries."""

from __future__ import annotations

import json

import pytest

from gpu_oom_exporter.analysis.incidents import Classifier
from gpu_oom_exporter.analysis.incidents.episodes import LONGEST_LINES
from gpu_oom_exporter.analysis.incidents.scanning import END_BYTES, LONGEST_BYTES, PAST_BYTES
from tests.analysis.incidents.test_folding import oom
from tests.eval_incidents import classify

E = "RuntimeError: CUDA error: out of memory"
ISO = "2026-03-04T05:06:07.100000123Z"


def test_progress_bars() -> None:
    """A bar drawn with carriage returns is many lines; what comes after its last one is read."""
    bar = "\r".join(f"Loading safetensors checkpoint shards: {n}% Completed" for n in range(100))
    (incident,) = classify(f"{bar}\r{oom()}\nnext\n".encode())
    assert (incident.category, incident.line) == ("cuda_oom_weights_load", 1)


def test_huge_bar() -> None:
    """Ten megabytes without a line end are read as they come, with bounded memory."""
    classifier = Classifier()
    for _ in range(100):
        classifier.feed((b"downloading %s\r" % (b"#" * 1000)) * 100)
        classifier.feed(b"Capturing CUDA graphs:  20%|##        | 7/35 [00:03<00:14]\r")
        assert len(classifier.scanner._carry) <= LONGEST_BYTES + 65536
    found = classifier.feed(oom().encode() + b"\n") + classifier.close()
    assert [incident.category for incident in found] == ["cuda_oom_cuda_graph_capture"]


def test_huge_line() -> None:
    """Of a line of ten megabytes the head and the tail are read, in any chunks, and what follows it is not lost."""
    body = b"x" * 10_000_000
    head = classify(oom().encode() + body + b"\n")
    tail = classify(body + b" " + oom().encode() + b"\n" + b"ordinary\n")
    after = classify(body + b"\n" + oom().encode() + b"\n", chunk=100_000)
    assert [len(found) for found in (head, tail, after)] == [1, 1, 1]
    assert (2, len(body) + 1) == (after[0].line, after[0].offset)
    middle = b"x" * END_BYTES + b" " + oom().encode() + b" " + b"x" * LONGEST_BYTES
    assert classify(middle + b"\n") == classify(middle + b"\n", chunk=4096) == []


def test_memory() -> None:
    """What is kept between chunks does not grow with the log."""
    classifier = Classifier()
    for number in range(300):
        classifier.feed(f"(EngineCore pid={number}) {oom(gpu=number)}\n".encode() * 20)
        assert len(classifier.folder.open) <= 64
        assert len(classifier.scanner._past) <= PAST_BYTES


def test_storm() -> None:
    """An error that never stops is told again and again, not once and not each time."""
    lines = LONGEST_LINES * 3 // 100 * 100
    found = classify((oom().encode() + b"\n") * lines)
    assert 3 <= len(found) <= 5


def test_low_water() -> None:
    """Until an incident is told, reading must begin again at its first line; afterwards, at the end."""
    classifier = Classifier()
    first = b"ordinary\n"
    classifier.feed(first + oom().encode() + b"\n")
    assert len(first) == classifier.low_water
    told = classifier.feed(b"ordinary\n" * 2100)
    assert len(told) == 1
    assert classifier.low_water == classifier.scanner.offset


def test_docker_pieces() -> None:
    """A line that docker split at 16 KiB is one line, also where the split is inside the message."""
    long = "padding " * 2047 + oom()
    for cut in (16384, 16390, 16420):
        parts = [long[:cut], long[cut:] + "\n"]
        lines = [json.dumps({"log": part, "stream": "stderr", "time": ISO}, separators=(",", ":")) for part in parts]
        other = json.dumps({"log": "something else\n", "stream": "stdout", "time": ISO}, separators=(",", ":"))
        (incident,) = classify("\n".join((lines[0], other, lines[1])).encode())
        assert (incident.line, incident.fields["tried_bytes"]) == (1, 2 << 30)


def test_lost_end() -> None:
    """A split line whose end never comes is read as far as it came."""
    part = f"{ISO} stderr P {oom()}\n"
    ordinary = f"{ISO} stdout F ordinary\n"
    assert len(classify((part + ordinary * 50).encode())) == 1
    assert classify((part[:60] + "\n" + ordinary * 900).encode()) == []


def test_mixed() -> None:
    """Formats may change within a file."""
    docker = json.dumps({"log": oom(gpu=1) + "\n", "stream": "stderr", "time": ISO})
    lines = [oom(gpu=0), docker, f"{ISO} stderr F {oom(gpu=2)}", json.dumps({"MESSAGE": oom(gpu=3), "_PID": "4"})]
    assert [incident.fields["gpu"] for incident in classify("\n".join(lines).encode())] == [0, 1, 2, 3]


def test_binary() -> None:
    """Bytes that are no text are skipped, and text between them is read."""
    noise = bytes(range(256)) * 40
    found = classify(noise + b"\n" + b"\xff\xfe" + b"\n" + oom().encode() + b"\n" + noise)
    assert len(found) == 1
    (utf16,) = classify(b"caf\xe9 \xff " + oom().encode() + b"\n")
    assert utf16.fields["tried_bytes"] == 2 << 30


def test_no_line_end() -> None:
    """The last line counts without its end."""
    assert len(classify(oom().encode())) == 1
    assert classify(b"") == []


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "line",
    [
        '{"level":"error","msg":"\\ud800 CUDA error: out of memory"}',
        "ValueError: Free memory on device (1/2 GiB) on startup is less than desired GPU memory utilization (0.9.1, 71.24 GiB).",
        f"(EngineCore_DP0 pid={HUGE}) ERROR {oom()}",
        f"[rank{HUGE}]: {oom()}",
        f"Jan  9 11:20:31 node app[{HUGE}]: {oom()}",
        oom(extra=f"Process {HUGE} has 1.00 GiB memory in use. "),
        f"RuntimeError: CUDA out of memory. Tried to allocate {HUGE[:400]} GiB.",
        '{"MESSAGE": "CUDA error: out of memory", "_PID": "²"}',
        f'{{"MESSAGE": "CUDA error: out of memory", "_PID": "{HUGE}"}}',
        "# nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv,noheader\n²², ²² MiB, python",
        "# ps -o pid,ppid,stat,comm\n²² ² R python",
        "[" * 100_000 + "CUDA error: out of memory",
        '{"a":' * 100_000 + '"CUDA error: out of memory"',
    ],
    ids=lambda line: line[:40],
)
def test_hostile(line: str) -> None:
    """Numbers that are none, halves of characters, endless nesting: nothing is raised, and nothing absurd is told."""
    for incident in classify(line.encode("utf-8", "surrogatepass") + b"\n"):
        assert all(abs(value) < 1e19 for value in incident.fields.values() if isinstance(value, int))


def test_endless_pieces() -> None:
    """Pieces that never end are read as far as they came, again and again, within bounds."""
    part = f"{ISO} stdout P {E}\n".encode()
    classifier = Classifier()
    for _ in range(50):
        classifier.feed(part * 400)
        assert sum(split.size for split in classifier._pieces._open.values()) <= LONGEST_BYTES + 100
    assert classifier.low_water < classifier.scanner.offset
