"""`explain`: files and pipes in, what happened out; exit status, JSON keys, bad input."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpu_oom_exporter.cli import main
from tests.conftest import COMMAND, HERE
from tests.eval_incidents import cases, text

LOGS = HERE / "captures" / "logs"
OOM = (
    "(EngineCore_DP0 pid=77) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.11 GiB of which 1.00 GiB is free. Process 99 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "48.00 GiB memory in use. Of the allocated memory 46.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["explain", "--output=json", *arguments])
    return status, json.loads(capsys.readouterr().out)["incidents"]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fixed keys, with numbers in bytes and remedies for the version in the log."""
    log = tmp_path / "vllm.log"
    log.write_text(f"INFO 05-10 16:00:15 [api_server.py:1043] vLLM API server version 0.8.5\nordinary\n{OOM}\n")
    status, (incident,) = as_json(capsys, str(log))
    assert status == 1
    assert {"category", "severity", "fields", "cause", "remedy", "runbook", "line"} <= set(incident)
    assert (incident["category"], incident["severity"], incident["line"]) == ("cuda_oom_co_tenant", "error", 3)
    assert {n: incident["fields"][n] for n in ("pid", "gpu", "tried_bytes")} == {
        "pid": 77,
        "gpu": 3,
        "tried_bytes": 2 << 30,
    }
    assert "PID 99 holds 30.0 GiB" in incident["cause"]
    assert (incident["engine"], incident["version"]) == ("vllm", "0.8.5")
    assert not any("--kv-cache-memory-bytes" in line for line in incident["remedy"])
    assert incident["runbook"].endswith("#cuda_oom_co_tenant")


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What, the numbers as a picture, why, what to do first; within 80 columns."""
    log = tmp_path / "vllm.log"
    log.write_text(OOM)
    assert main(["explain", str(log)]) == 1
    out = capsys.readouterr().out
    for words in (
        "ERROR",
        "Out of GPU memory because another process holds it",
        "line 1",
        "PID 77",
        "GPU 3",
        "live 46.0 GiB",
        "wanted 2.0 GiB",
        "first",
        "holders",
    ):
        assert words in out, words
    assert all(len(line) <= 80 for line in out.splitlines())


def test_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy log is exit 0 and one sentence; in JSON an empty list."""
    log = str(LOGS / "vllm-0.32-startup.log")
    assert main(["explain", log]) == 0
    assert capsys.readouterr().out == "No incident found.\n"
    assert as_json(capsys, log) == (0, [])


def test_warning_is_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only error and critical are exit 1."""
    log = tmp_path / "log"
    log.write_text("[1.0] NVRM: Xid (PCI:0000:81:00): 43, pid=40551, name=python, Ch 00000010\n")
    status, (incident,) = as_json(capsys, str(log))
    assert (status, incident["severity"]) == (0, "warning")


def test_version_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hint decides remedies where the log does not tell the version."""
    log = tmp_path / "log"
    log.write_text("ERROR 01-01 00:00:00 [scheduler.py:1] RuntimeError: Aborted due to the lack of CPU swap space.\n")
    remedies = {v: as_json(capsys, str(log), f"--version-hint={v}")[1][0]["remedy"] for v in ("0.6.3", "0.32.0")}
    assert any(line.startswith("--swap-space N") for line in remedies["0.6.3"])
    assert any(line.startswith("do not: --swap-space") for line in remedies["0.32.0"])
    assert main(["explain", str(log), "--version-hint", "newest"]) == 2
    assert "--version-hint: 'newest' is no version" in capsys.readouterr().err


def test_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is a stream of its own and is named."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(OOM + "\n")
    _, found = as_json(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert [str(tmp_path / "a"), str(tmp_path / "b")] == [incident["file"] for incident in found]
    main(["explain", str(tmp_path / "a"), str(tmp_path / "b")])
    assert str(tmp_path / "a") in capsys.readouterr().out.replace("\n", "")


def test_gzip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotated, compressed log is read as it is; a damaged one is a sentence."""
    log = tmp_path / "vllm.log.1.gz"
    log.write_bytes(gzip.compress(OOM.encode() + b"\n" + b"x\n" * 9000))
    assert as_json(capsys, str(log))[0] == 1
    log.write_bytes(log.read_bytes()[:-40])
    assert main(["explain", str(log)]) == 2
    assert "the compressed file is damaged" in capsys.readouterr().err


def test_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chosen format is taken at its word."""
    log = tmp_path / "log"
    log.write_text(json.dumps({"log": OOM + "\n", "stream": "stderr", "time": "2026-03-04T05:06:07Z"}) + "\n")
    assert as_json(capsys, str(log), "--format=docker-json")[0] == 1
    assert as_json(capsys, str(log), "--format=plain")[0] == 0
    assert main(["explain", str(log), "--format=xml"]) == 2


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("missing.log", "No such file or directory"), (".", "Is a directory")],
)
def test_bad_file(name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read is named, with the reason; exit 2."""
    path = str(tmp_path / name)
    assert main(["explain", path]) == 2
    assert f"{path}: {sentence}" in capsys.readouterr().err


def test_binary_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """journald's own files are binary; the sentence says what to do."""
    path = tmp_path / "system.journal"
    path.write_bytes(b"LPKSHHRH" + bytes(100))
    assert main(["explain", str(path)]) == 2
    assert "journalctl --file" in capsys.readouterr().err


def test_pipe() -> None:
    """Standard input is read with or without a dash, and the status is the shell's."""
    for arguments in (["-"], []):
        done = subprocess.run([*COMMAND, "explain", *arguments], input=OOM.encode(), capture_output=True)
        assert done.returncode == 1
        assert b"another process holds it" in done.stdout


def test_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file on a terminal it does not wait for typing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["explain"]) == 2
    assert "name a log file" in capsys.readouterr().err


def test_every_case_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every incident of the corpus has a picture or none, a cause and a plan, and prints."""
    for case in cases():
        log = tmp_path / "log"
        log.write_bytes(text(case))
        assert main(["explain", str(log)]) in (0, 1)
        out = capsys.readouterr().out
        assert "{" not in out.replace("{{.State", ""), case["id"]
        assert ("No incident" in out) == (not case["expected"])
