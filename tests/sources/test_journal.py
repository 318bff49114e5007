"""The journal: written by systemd-journal-remote, read through libsystemd; who may speak for the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_oom_exporter.daemon.watching import Watch
from gpu_oom_exporter.model import LogFacts, LogOrigin, LogPosition
from gpu_oom_exporter.publish.archive import Archive
from gpu_oom_exporter.sources.journal import Journal, entry_of
from gpu_oom_exporter.sources.logs import LogFiles
from tests.conftest import ManualClock, need

REMOTE = Path("/lib/systemd/systemd-journal-remote")
E = "RuntimeError: CUDA error: out of memory"
KERNEL = {"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel"}
UNIT = {
    "_TRANSPORT": "stdout",
    "SYSLOG_IDENTIFIER": "vllm",
    "_PID": "5326",
    "_UID": "997",
    "_SYSTEMD_UNIT": "vllm.service",
}
SYSTEMD = {"_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "systemd", "_COMM": "systemd", "_PID": "1", "_UID": "0"}
XID = "NVRM: Xid (PCI:0000:01:00): 79, pid=7, name=python, GPU has fallen off the bus."


class Written:
    """A journal that entries can be added to."""

    def __init__(self, folder: Path) -> None:
        need(REMOTE.exists() and REMOTE, "systemd-journal-remote")
        self.root = folder / "journal"
        self.root.mkdir()
        self.count = 0
        self.file = "remote.journal"

    def add(self, message: str | bytes, **fields: str) -> None:
        self.count += 1
        raw = message.encode() if isinstance(message, str) else message
        head = {
            "__REALTIME_TIMESTAMP": str(1767225600000000 + self.count * 1000),
            "__MONOTONIC_TIMESTAMP": str(self.count * 1000),
            "_BOOT_ID": "5b1c0d3e7a884f2b9be4c9e1f0a3d612",
            **fields,
        }
        entry = b"".join(f"{name}={value}\n".encode() for name, value in head.items())
        entry += b"MESSAGE\n" + len(raw).to_bytes(8, "little") + raw + b"\n\n"
        subprocess.run(
            [str(REMOTE), "-o", str(self.root / self.file), "-"], input=entry, check=True, capture_output=True
        )


@pytest.fixture
def written(tmp_path: Path) -> Written:
    found = Written(tmp_path)
    found.add("an entry from before us", **UNIT)
    return found


def watch(written: Written, clock: ManualClock, *, kernel: bool = False) -> Watch:
    archive = Archive(str(written.root.parent / "a.sqlite"))
    found = Watch(LogFiles({}), None, archive, clock, Journal((str(written.root),)))
    found.round()
    return found


def facts(found: Watch, clock: ManualClock) -> LogFacts:
    for _ in range(4):
        clock.advance(2.0)
        found.round()
    assert found.facts is not None
    return found.facts


def test_a_unit(written: Written, clock: ManualClock) -> None:
    """An engine's error in the journal is found, binary messages too, with the unit it belongs to."""
    found = watch(written, clock)
    written.add(f"\x1b[31m{E}\x1b[0m", **UNIT)
    written.add(
        b"caf\xe9 " + E.encode(),
        **{**UNIT, "SYSLOG_IDENTIFIER": "sglang", "_PID": "9", "_SYSTEMD_UNIT": "sglang.service"},
    )
    told = facts(found, clock)
    assert told.totals == {"cuda_oom_generic": 2}
    assert [recorded.origin.container_id for recorded in told.recent] == ["vllm.service", "sglang.service"]
    assert told.recent[0].incident.fields["pid"] == 5326
    found.close()


def test_from_before(written: Written, clock: ManualClock) -> None:
    """What was in the journal before the first start happened before us."""
    written.add(E, **UNIT)
    found = watch(written, clock)
    assert facts(found, clock).totals == {}
    found.close()


def test_extra_comes_later(written: Written) -> None:
    """A daemon that has positions of other logs, and reads the journal for the first time, does not tell its past."""
    journal = Journal((str(written.root),))
    journal.begin(None, known=True)
    written.add(E, **UNIT)
    assert [entry.number for entry in journal.read(10)] == [2]


def test_who_speaks_for_the_host(written: Written, clock: ManualClock) -> None:
    """Kernel lines count by the kernel's transport, systemd's by root's systemd; what anybody else writes is forged."""
    found = watch(written, clock)
    forged = {"_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "kernel", "_PID": "7", "_UID": "1000"}
    written.add(XID, **forged)
    written.add("vllm.service: Failed with result 'oom-kill'.", **{**SYSTEMD, "_UID": "1000"})
    written.add(E, **KERNEL)
    assert facts(found, clock).totals == {}
    written.add(XID, **KERNEL)
    written.add("vllm.service: Failed with result 'oom-kill'.", **SYSTEMD)
    assert facts(found, clock).totals == {"gpu_lost": 1, "host_oom_kill_cgroup": 1}
    found.close()


def test_container(written: Written, clock: ManualClock) -> None:
    """What dockerd writes for a container is the container's, and says nothing of the host."""
    found = watch(written, clock)
    dockerd = {**SYSTEMD, "SYSLOG_IDENTIFIER": "ab" * 6, "_COMM": "dockerd", "CONTAINER_ID_FULL": "ab" * 32}
    dockerd["_SYSTEMD_UNIT"] = "docker.service"
    written.add("vllm.service: Failed with result 'oom-kill'.", **dockerd)
    written.add(XID, **dockerd)
    written.add(E, **dockerd)
    told = facts(found, clock)
    assert told.totals == {"cuda_oom_generic": 1}
    assert told.recent[0].origin == LogOrigin("journal", "journal", "ab" * 32)
    found.close()


def test_hidden(written: Written, clock: ManualClock) -> None:
    """The incidents of a eighty units at once are all told: a storm of voices ends none."""
    found = watch(written, clock)
    for number in range(80):
        written.add(E, **{**UNIT, "_SYSTEMD_UNIT": f"vllm@{number}.service", "_PID": str(1000 + number)})
    assert facts(found, clock).totals == {"cuda_oom_generic": 80}
    found.close()


def test_restart(written: Written, clock: ManualClock) -> None:
    """After a restart nothing is lost and nothing counted twice, whatever is still open."""
    found = watch(written, clock)
    written.add(E, **UNIT)
    assert facts(found, clock).totals == {"cuda_oom_generic": 1}
    found.close()
    written.add(XID, **KERNEL)
    again = watch(written, clock)
    assert facts(again, clock).totals == {"cuda_oom_generic": 1, "gpu_lost": 1}
    again.close()


def test_gone(written: Written) -> None:
    """If the entry where reading would go on is gone, the first after it is not skipped."""
    written.add(E, **UNIT)
    cursor = f"s={'a' * 32};i=1;b=5b1c0d3e7a884f2b9be4c9e1f0a3d612;m=0;t=5e4f0a3d61200;x=1"
    after = Journal((str(written.root),))
    after.begin(LogPosition(cursor, 0, 0), known=True)
    assert [entry.number for entry in after.read(10)] == [1, 2]


def test_comes_and_fails(tmp_path: Path, clock: ManualClock) -> None:
    """A journal that comes after us is read from its start; one that fails goes on where it stopped, and it is said."""
    folder = tmp_path / "a" / ("5b1c0d3e" * 4)
    folder.mkdir(parents=True)
    journal = Journal((str(tmp_path / "none"),))
    found = Watch(LogFiles({}), None, Archive(str(tmp_path / "a.sqlite")), clock, journal)
    found.round()
    written = Written(folder)
    written.add(E, **UNIT)
    journal.roots = (str(folder / "journal"),)
    clock.advance(31.0)
    assert facts(found, clock).totals == {"cuda_oom_generic": 1}
    journal._reader = object()  # as good as one whose file is gone
    found.round()
    assert not journal.readable
    assert "process_events" in journal.detail
    written.add(XID, **KERNEL)
    clock.advance(31.0)
    assert facts(found, clock).totals == {"cuda_oom_generic": 1, "gpu_lost": 1}
    found.close()


def test_machine_and_rotation(tmp_path: Path, clock: ManualClock) -> None:
    """journald keeps files in a folder named after the machine, and begins new ones."""
    folder = tmp_path / "a"
    folder.mkdir()
    written = Written(folder)
    (written.root / ("5b1c0d3e" * 4)).mkdir()
    written.file = f"{'5b1c0d3e' * 4}/system.journal"
    written.add("before", **UNIT)
    found = watch(written, clock)
    written.add(E, **UNIT)
    first = written.root / written.file
    first.rename(first.with_name(f"system@{'a' * 32}-0000000000000001-0005e4f0a3d61200.journal"))
    written.add(XID, **KERNEL)
    assert facts(found, clock).totals == {"cuda_oom_generic": 1, "gpu_lost": 1}
    found.close()


def test_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a journal, or without the extra, the reason is said and nothing else happens."""
    none = Journal((str(tmp_path / "a"), str(tmp_path / "b")))
    none.begin(None, known=False)
    assert none.detail == f"there is no {tmp_path}/a and no {tmp_path}/b"
    monkeypatch.setitem(sys.modules, "cysystemd.reader", None)
    missing = Journal((str(tmp_path),))
    missing.begin(None, known=False)
    assert "pip install 'gpu-oom-exporter[journal]'" in missing.detail
    assert list(missing.read(10)) == []


def test_entries() -> None:
    """An entry is named by its journal and number; without a message it is none."""
    cursor = "s=ec8e;i=1f;b=5b1c;m=0;t=64;x=54"
    found = entry_of(1, cursor, {"MESSAGE": "hello", "_TRANSPORT": "kernel"}, 1)
    assert found is not None
    assert (found.file, found.number, found.kernel, found.host) == ("ec8e", 31, True, False)
    assert entry_of(1, cursor, {}, 1) is None
    assert entry_of(1, "nonsense", {"MESSAGE": "x"}, 1) is None
