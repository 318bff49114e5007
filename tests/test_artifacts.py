"""The generated files are what the catalogues say, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_oom_exporter.cli import main
from gpu_oom_exporter.cli.generate import files

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", files())
def test_up_to_date(path: str) -> None:
    """`gpu-oom-exporter generate` would change nothing."""
    assert (ROOT / path).read_text() == files()[path]


def test_check_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check names what is out of date and exits 1; without it the files are written."""
    assert main(["generate", "--check", "--out", str(tmp_path)]) == 1
    assert "docs/metrics.md: out of date" in capsys.readouterr().out
    assert main(["generate", "--out", str(tmp_path)]) == 0
    assert main(["generate", "--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "docs" / "metrics.md").write_text("edited")
    assert main(["generate", "--check", "--out", str(tmp_path)]) == 1


def test_nowhere_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be written is a sentence and exit 2."""
    assert main(["generate", "--out", "/proc/nowhere"]) == 2
    assert "/proc/nowhere/docs" in capsys.readouterr().err
