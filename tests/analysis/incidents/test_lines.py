"""Unwrapping: the program's own message out of every wrapper and prefix."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_oom_exporter.analysis.incidents.lines import Format, export, piece, seconds, unwrap

MESSAGE = b"RuntimeError: it failed"
ISO = "2026-03-04T05:06:07.100000123Z"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("RuntimeError: it failed", {}),
        ("\x1b[1;36m(EngineCore_0 pid=8812)\x1b[0;0m ERROR 04-30 10:20:36 [core.py:396] RuntimeError: it failed", {"pid": 8812, "level": "ERROR"}),
        ("ERROR 12-16 21:40:15 engine.py:135] RuntimeError: it failed", {"level": "ERROR"}),
        ("(RayWorkerWrapper pid=77, ip=10.1.2.3) ERROR 12-16 21:40:15 worker_base.py:157] RuntimeError: it failed", {"pid": 77, "name": "RayWorkerWrapper"}),
        ("(RayWorkerWrapper pid=77) [repeated 3x across cluster] RuntimeError: it failed", {"pid": 77}),
        ("(VllmWorkerProcess pid=221) ERROR 04-06 20:46:48 [multiproc_worker_utils.py:238] RuntimeError: it failed", {"pid": 221}),
        ("(VllmWorker rank=5 pid=21605) ERROR 07-07 15:19:48 [multiproc_executor.py:492] RuntimeError: it failed", {"pid": 21605, "rank": 5}),
        ("(Worker_DP1_TP1_EP3 pid=3) INFO 08-19 05:56:57 [gpu_model_runner.py:6936] RuntimeError: it failed", {"pid": 3, "name": "Worker_DP1_TP1_EP3", "level": "INFO"}),
        ("(EngineCore_DP0 pid=39) ERROR 11-14 15:11:23 [v1/engine/core.py:845] RuntimeError: it failed", {"pid": 39}),
        ("(APIServer pid=1) RuntimeError: it failed", {"pid": 1, "name": "APIServer"}),
        ("[2025-04-11 09:20:41 DP7 TP7] RuntimeError: it failed", {"rank": "DP7 TP7"}),
        ("[2025-04-11 09:20:41] RuntimeError: it failed", {}),
        ("[rank0]: RuntimeError: it failed", {"rank": 0}),
        ("vllm-1  | (EngineCore pid=5) RuntimeError: it failed", {"pid": 5, "stream": "vllm-1"}),
        ("[pod/vllm-0/vllm] (EngineCore pid=5) RuntimeError: it failed", {"stream": "vllm-0/vllm"}),
        ("[2026-02-24T20:21:58Z] (EngineCore_DP0 pid=2620) RuntimeError: it failed", {"pid": 2620}),
        ("INFO 2026-02-24T20:21:58Z [resource.labels.containerName: vllm] RuntimeError: it failed", {"stream": "vllm", "level": ""}),
        ("Dec 18 19:34:56 host vllm[840]: RuntimeError: it failed", {"program": "vllm", "reporter_pid": 840}),
        ("Dec  8 19:34:56 host kernel: [81234.120011] RuntimeError: it failed", {"program": "kernel", "reporter_pid": None}),
        ("[81234.120011] RuntimeError: it failed", {}),
        ("[Wed Jan  9 11:20:31 2026] RuntimeError: it failed", {}),
        ("6,1234,5678901,-;RuntimeError: it failed", {}),
        ("<4>[81234.120011] RuntimeError: it failed", {}),
        (f"{ISO} stderr F RuntimeError: it failed", {}),
        ("0.02.853.935 E RuntimeError: it failed", {"level": "ERROR"}),
        ("2023-06-02T14:05:11.203334Z ERROR RuntimeError: it failed", {"level": "ERROR"}),
        ("E0505 18:42:19.812688    1311 pod_workers.go:949] RuntimeError: it failed", {"level": "ERROR"}),
        ("ERROR:root:RuntimeError: it failed", {"level": "ERROR"}),
        ("  | RuntimeError: it failed", {}),
        ("gpu-node:221:402 [1] RuntimeError: it failed", {"pid": 221}),
        (json.dumps({"log": "RuntimeError: it failed\n", "stream": "stderr", "time": ISO}), {}),
        (json.dumps({"MESSAGE": "RuntimeError: it failed", "_PID": "88", "SYSLOG_IDENTIFIER": "vllm"}), {"reporter_pid": 88}),
        (json.dumps({"MESSAGE": list(MESSAGE), "_PID": "88", "SYSLOG_IDENTIFIER": "vllm"}), {"reporter_pid": 88}),
        (json.dumps({"MESSAGE": "RuntimeError: it failed", "_PID": "1", "SYSLOG_IDENTIFIER": "systemd"}), {"reporter_pid": None}),
        (json.dumps({"MESSAGE": "RuntimeError: it failed", "_TRANSPORT": "kernel"}), {"program": "kernel"}),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_wrappers(raw: str, said: dict[str, object]) -> None:
    """The message is the same in all of them, and what the wrapper says about its writer is kept."""
    line = unwrap(raw.encode())
    assert line is not None
    assert line.text == MESSAGE
    assert said == {name: getattr(line.speaker, name) for name in said}


def test_chosen_format() -> None:
    """A chosen format unwraps nothing else."""
    raw = json.dumps({"log": "hello\n", "stream": "stderr", "time": ISO}).encode()
    line = unwrap(raw, Format.PLAIN)
    assert raw == line.text


def test_json_that_is_no_wrapper() -> None:
    """A program that logs JSON is not taken for docker."""
    raw = b'{"level": "info", "msg": "log me"}'
    line = unwrap(raw)
    assert raw == line.text


def test_export() -> None:
    """Binary fields of an export record are length-prefixed and may hold line ends."""
    text = b"\x1b[31mfirst\nsecond"
    block = (
        b"__CURSOR=x\n_PID=7\nSYSLOG_IDENTIFIER=vllm\nMESSAGE\n"
        + len(text).to_bytes(8, "little")
        + text
        + b"\nPRIORITY=3\n"
    )
    line = export(block)
    assert line is not None
    assert (line.text, line.speaker.reporter_pid) == (b"first\nsecond", 7)
    assert export(b"__CURSOR=x\n_PID=7\n") is None
    assert export(b"MESSAGE\n\xff\xff\xff\xff\xff\xff\xff\x7fcut") is not None


def test_pieces() -> None:
    """Docker's pieces end without a line end, CRI's say P."""
    assert piece(f"{ISO} stdout P part".encode(), Format.AUTO) == (b"part", True)
    assert piece(f"{ISO} stdout F end".encode(), Format.AUTO) == (b"end", False)
    docker = {"log": "part", "stream": "stderr", "time": ISO}
    assert piece(json.dumps(docker).encode(), Format.AUTO) == (b"part", True)
    assert piece(b"an ordinary line", Format.AUTO) is None


def test_seconds() -> None:
    """Differences on one clock are seconds; what is no time is unknown."""
    assert (seconds(b"12-31 23:59:30", "vllm") or 0) - (seconds(b"12-31 23:58:00", "vllm") or 0) == 90
    assert (seconds(b"Feb 29 10:01:00", "syslog") or 0) - (seconds(b"Feb 29 10:00:00", "syslog") or 0) == 60
    assert seconds(b"1.5", "boot") == 1.5
    assert seconds(b"99-99 99:99:99", "vllm") is None
    assert seconds(b"", "") is None


@given(st.binary(max_size=400))
def test_anything(raw: bytes) -> None:
    """Any bytes are a line."""
    unwrap(raw)
    piece(raw, Format.AUTO)
    export(raw)
