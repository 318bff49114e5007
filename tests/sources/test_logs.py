"""Following logs: rotation, truncation, deletion, permission, restarts, storms; the kernel's messages by facility."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpu_oom_exporter.model import LogPosition
from gpu_oom_exporter.sources import logs
from gpu_oom_exporter.sources.logs import Chunk, Ended, KernelMessages, LogFiles, origin_of, patterns_of


class Reader:
    """Everything that a `LogFiles` handed out, and where it would go on."""

    def __init__(self, folder: Path, marks: dict[str, LogPosition] | None = None) -> None:
        self.files = LogFiles({f"{folder}/*.log": ""}, marks or {})
        self.text: list[bytes] = []
        self.ended = 0
        self.skipped = 0
        self.marks: dict[str, LogPosition] = dict(marks or {})

    def look(self, times: int = 3) -> bytes:
        """Look and read *times*; returns what is new."""
        before = len(self.text)
        for _ in range(times):
            self.files.look()
            for event in self.files.read(100):
                if isinstance(event, Ended):
                    self.ended += 1
                    continue
                self.text.append(event.data)
                self.skipped += event.skipped_lines
                end = event.offset + len(event.data)
                self.marks[event.origin.stream] = LogPosition(event.file, event.head, end)
        return b"".join(self.text[before:])

    def restarted(self, folder: Path) -> Reader:
        self.files.close()
        return Reader(folder, self.marks)


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


LONG = "a first line that is long enough for the checksum of the head of the file " * 5 + "\n"


def test_first_look(tmp_path: Path) -> None:
    """What a file holds when we first see it happened before us; a file that appears later is read from its start."""
    add(tmp_path / "a.log", "old\n")
    reader = Reader(tmp_path)
    assert reader.look() == b""
    add(tmp_path / "a.log", "new\n")
    add(tmp_path / "b.log", "from the start\n")
    assert {b"new", b"from the start"} == set(reader.look().splitlines())


def test_rename(tmp_path: Path) -> None:
    """A rotated file is read to its end, also what is written after the rename, then the new one from its start."""
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    with path.open("a") as writer:
        writer.write("one\n")
        writer.flush()
        path.rename(tmp_path / "a.log.1")
        assert reader.look(1) == b"one\n"
        writer.write("two\n")
        writer.flush()
        assert reader.look(1) == b"two\n"
    add(path, "three\n")
    assert reader.look() == b"three\n"
    assert reader.ended == 1
    assert reader.files.gaps == {}


def test_truncate(tmp_path: Path) -> None:
    """A file truncated in place begins anew, under another identity, also when it has grown beyond where we were."""
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    add(path, LONG * 3)
    reader.look()
    identity = reader.marks[f"file:{path}"].file
    path.write_text("short\n")
    assert reader.look() == b"short\n"
    path.write_text("another head " * 200 + "\n")
    assert reader.look().endswith(b"another head \n")
    assert identity != reader.marks[f"file:{path}"].file
    assert reader.files.gaps["truncated"] >= 1


def test_deleted(tmp_path: Path) -> None:
    """A deleted file is read to its end and let go of."""
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    add(path, "last words\n")
    path.unlink()
    assert reader.look() == b"last words\n"
    assert (reader.ended, reader.files.files) == (1, 0)


def test_restart(tmp_path: Path) -> None:
    """Nothing is lost and nothing read twice, with and without a rotation while we were away."""
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    add(path, LONG)
    reader.look()
    reader = reader.restarted(tmp_path)
    add(path, "while away\n")
    assert reader.look() == b"while away\n"
    reader = reader.restarted(tmp_path)
    add(path, "before the rename\n")
    path.rename(tmp_path / "a.log.1")
    add(path, "after the rename\n")
    assert reader.look() == b"before the rename\nafter the rename\n"
    reader = reader.restarted(tmp_path)
    path.write_text("truncated and " + LONG * 3)
    assert reader.look() == path.read_bytes()
    assert reader.files.gaps == {"truncated": 1}


def test_rotated_away(tmp_path: Path) -> None:
    """A file that is gone after a restart is a gap that is counted; the new one is read from its start."""
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    add(path, LONG)
    reader.look()
    reader = reader.restarted(tmp_path)
    path.rename(tmp_path / "elsewhere")
    add(path, "new\n")
    assert reader.look() == b"new\n"
    assert reader.files.gaps == {"rotated_away": 1}


def test_not_readable(tmp_path: Path) -> None:
    """A file that cannot be opened is named with the reason, and does not stop the others."""
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    (tmp_path / "folder.log").mkdir()
    add(tmp_path / "good.log", "")
    reader = Reader(tmp_path)
    reader.look()
    add(tmp_path / "good.log", "fine\n")
    assert reader.look() == b"fine\n"
    assert {str(tmp_path / "loop.log"): "Too many levels of symbolic links"} == reader.files.unreadable


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_permission(tmp_path: Path) -> None:
    """EACCES is named; when the permission comes, the file is followed."""
    path = tmp_path / "a.log"
    add(path, "secret\n")
    path.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    reader = Reader(tmp_path)
    os.seteuid(65534)
    try:
        reader.look()
        assert {str(path): "Permission denied"} == reader.files.unreadable
    finally:
        os.seteuid(0)
    assert reader.look() == b"secret\n"
    assert reader.files.unreadable == {}


def test_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is too far ahead is skipped to its newest part at a line's start; every skipped line is counted."""
    monkeypatch.setattr(logs, "MOST_BEHIND_BYTES", 10_000)
    path = tmp_path / "a.log"
    add(path, "")
    reader = Reader(tmp_path)
    reader.look()
    written = [f"line {n}\n" for n in range(50_000)]
    add(path, "".join(written))
    read = reader.look().decode().splitlines(keepends=True)
    assert read == written[-len(read) :]
    assert len(written) == len(read) + reader.skipped
    assert reader.skipped > 40_000


def test_turns(tmp_path: Path) -> None:
    """One log's storm does not keep the others waiting."""
    for name in ("a", "b"):
        add(tmp_path / f"{name}.log", "")
    files = LogFiles({f"{tmp_path}/*.log": ""})
    files.look()
    add(tmp_path / "a.log", "x" * (logs.CHUNK_BYTES * 20))
    add(tmp_path / "b.log", "b\n")
    first = [event for event in files.read(2) if isinstance(event, Chunk)]
    assert [sum(c.origin.stream.endswith(f"{name}.log") for c in first) for name in ("a", "b")] == [2, 1]


def test_origins() -> None:
    """The kubelet's and docker's paths say whose a log is."""
    pod = origin_of("/var/log/pods/prod_vllm-0_3f2a/vllm/0.log")
    assert (pod.kind, pod.namespace, pod.pod, pod.container) == ("pod", "prod", "vllm-0", "vllm")
    name = "ab" * 32
    docker = origin_of(f"/var/lib/docker/containers/{name}/{name}-json.log")
    assert ("docker", name) == (docker.kind, docker.container_id)
    assert origin_of("/var/log/vllm.log", "chat").kind == "file"
    assert patterns_of("/d", "/p", [("/x/*.log", "chat")]) == {
        "/x/*.log": "chat",
        "/d/*/*-json.log": "",
        "/p/*/*/*.log": "",
    }


def kernel(path: Path, records: Iterable[str], after: int = -1) -> KernelMessages:
    path.write_text("".join(records))
    (path.parent / "boot_id").write_text("boot-1\n")
    found = KernelMessages(str(path), str(path.parent / "boot_id"))
    found.begin(LogPosition("boot-1", 0, after) if after >= 0 else None, known=True)
    return found


def one_by_one(messages: KernelMessages, monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """What /dev/kmsg gives record by record, from a plain file."""
    records = iter(Path(messages.path).read_bytes().splitlines(keepends=True))
    monkeypatch.setattr(KernelMessages, "_next", lambda self: next(records, None))
    return list(messages.read(100))


def test_kernel_facility(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only facility 0 is the kernel: anybody may write other facilities to /dev/kmsg."""
    forged = "12,7,1000,-;NVRM: Xid (PCI:0000:01:00): 79, forged\n"  # facility 1, as the kernel stores what users write
    real = "4,8,2000,-;NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=python\n"
    messages = kernel(tmp_path / "kmsg", [forged, real])
    found = one_by_one(messages, monkeypatch)
    assert [chunk.offset for chunk in found] == [8]
    assert messages.xids == {("0000:01:00", 31): 1}
    assert found[0].file == "boot-1"


def test_kernel_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages up to the position are not read again."""
    records = [f"4,{n},{n},-;message {n}\n" for n in range(5)]
    found = one_by_one(kernel(tmp_path / "kmsg", records, after=2), monkeypatch)
    assert [chunk.offset for chunk in found] == [3, 4]


def test_no_kernel(tmp_path: Path) -> None:
    """Where the device cannot be read, the reason is kept and nothing else happens."""
    messages = KernelMessages(str(tmp_path / "none"), str(tmp_path / "boot_id"))
    messages.begin(None, known=False)
    assert not messages.readable
    assert "No such file" in messages.detail
    assert list(messages.read(10)) == []


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="/dev/kmsg cannot be used here")
def test_real_kernel() -> None:
    """On the real device: what a user writes there has facility 1 and is not read, whatever it claims."""
    messages = KernelMessages()
    messages.begin(None, known=False)
    with open("/dev/kmsg", "w") as device:
        device.write("<4>NVRM: Xid (PCI:0000:01:00): 79, forged by a test of gpu_oom_exporter\n")
    assert b"forged" not in b"".join(chunk.data for chunk in messages.read(1000))
    assert messages.after >= 0
    messages.close()
