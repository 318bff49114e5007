"""Who a PID is: real processes on this machine, and trees that a real one cannot show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_oom_exporter.model import Process
from gpu_oom_exporter.sources.procfs import HOST_PID_NAMESPACE, PORTS_AGAIN_SECONDS, Reader
from tests.conftest import need, wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    yield process
    process.kill()
    process.wait()


def test_a_real_process(sleeper: subprocess.Popen[bytes]) -> None:
    """Command, user, state, parent, start and command line, with its ancestors."""
    reader = Reader()
    found = reader.families([sleeper.pid], 0.0)
    process = found[sleeper.pid]
    assert (process.comm, process.ppid, process.argv) == ("sleep", os.getpid(), ("sleep", "60"))
    assert process.state in "RS"
    assert process.start_ticks > 0
    assert process.cgroup == "" or process.cgroup.startswith("/")
    assert os.getpid() in found
    assert 1 not in found


def test_it_ends_between_two_looks(sleeper: subprocess.Popen[bytes]) -> None:
    """A process that is gone is not there; that is all."""
    reader = Reader()
    assert reader.look(sleeper.pid, 0.0)
    sleeper.kill()
    sleeper.wait()
    assert reader.look(sleeper.pid, 1.0), "believed for two seconds"
    assert reader.look(sleeper.pid, 3.0) is None


def test_a_reused_pid(tmp_path: Path) -> None:
    """Another start time is another process: nothing of the old one is believed."""
    reader = Reader(str(tmp_path))
    write(tmp_path, 42, comm="old", start=100, cmdline=b"old\0--secret\0")
    first = reader.look(42, 0.0)
    write(tmp_path, 42, comm="new", start=200, cmdline=b"new\0")
    second = reader.look(42, 10.0)
    assert first is not None
    assert second is not None
    assert (first.argv, second.argv) == (("old", "--secret"), ("new",))


def test_a_zombie() -> None:
    """A zombie has a state and no command line."""
    child = subprocess.Popen(["true"])

    def zombie() -> Process | None:
        process = Reader().look(child.pid, 0.0)
        return process if process is not None and process.state == "Z" else None

    process = wait_until(zombie)
    assert process.argv == ()
    child.wait()


def test_listening_ports(tmp_path: Path) -> None:
    """The ports a process listens on, found by socket inode; noticed when it opens one later."""
    code = """import socket, sys
sys.stdin.readline()
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.readline()"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        reader = Reader()
        process = reader.look(child.pid, 0.0)
        assert process is not None
        assert process.listening == frozenset()
        child.stdin.write("\n")
        child.stdin.flush()
        port = int(child.stdout.readline())
        process = reader.look(child.pid, PORTS_AGAIN_SECONDS + 1)
        assert process is not None
        assert process.listening == {port}
        child.kill()


def test_own_listener() -> None:
    """IPv6 too."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        found = Reader().listening(os.getpid())
        assert found is not None
        assert server.getsockname()[1] in found


def test_another_network_namespace() -> None:
    """Ports of another network namespace are not ours to match: unknown, not empty."""
    need(os.geteuid() == 0, "root, for unshare --net")
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as child:
        if child.poll() is not None:
            pytest.skip("this machine has no network namespaces")
        wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
        assert Reader().listening(child.pid) is None
        child.kill()


def test_host_pid_namespace(tmp_path: Path) -> None:
    """The initial PID namespace is known by its inode; anywhere else, and in doubt, the answer is no."""
    assert not Reader(str(tmp_path)).host_pids()
    (tmp_path / "self" / "ns").mkdir(parents=True)
    link = tmp_path / "self" / "ns" / "pid"
    link.symlink_to(HOST_PID_NAMESPACE)
    assert Reader(str(tmp_path)).host_pids()
    link.unlink()
    link.symlink_to("pid:[4026532198]")
    assert not Reader(str(tmp_path)).host_pids()


def test_a_real_pid_namespace() -> None:
    """Inside a fresh PID namespace the verdict is no, whatever it is outside."""
    need(os.geteuid() == 0, "root, for unshare --pid")
    code = "from gpu_oom_exporter.sources.procfs import Reader; print(Reader().host_pids())"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode != 0 and "unshare" in out.stderr:
        pytest.skip(f"this machine has no PID namespaces: {out.stderr.strip()}")
    assert out.stdout == "False\n"


def write(
    root: Path,
    pid: int,
    *,
    comm: str = "python3",
    state: str = "S",
    ppid: int = 1,
    start: int = 100,
    cmdline: bytes = b"",
    cgroup: str = "",
) -> None:
    """One process of a made-up /proc."""
    folder = root / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} ({comm}) {state} {ppid}{' 0' * 17} {start}{' 0' * 30}\n")
    (folder / "status").write_text("Name:\tx\nUid:\t4242\t4242\t4242\t4242\n")
    (folder / "cmdline").write_bytes(cmdline)
    (folder / "cgroup").write_text(cgroup)


@pytest.mark.parametrize("comm", ["a b", "a) S 1 (", "(((", ")", "a\nb", "\udcff"])
def test_names_that_break_parsers(tmp_path: Path, comm: str) -> None:
    """A name may hold brackets, blanks and newlines; the fields after it are still right."""
    folder = tmp_path / "42"
    folder.mkdir()
    raw = f"42 ({comm}) R 7{' 0' * 17} 99{' 0' * 30}\n".encode(errors="surrogateescape")
    (folder / "stat").write_bytes(raw)
    process = Reader(str(tmp_path)).look(42, 0.0)
    assert process is not None
    assert (process.state, process.ppid, process.start_ticks) == ("R", 7, 99)


def test_uninterruptible_sleep(tmp_path: Path) -> None:
    """The command line of a process in D state is not read: the read may wait for ever."""
    write(tmp_path, 42, state="D", cmdline=b"vllm\0serve\0")
    process = Reader(str(tmp_path)).look(42, 0.0)
    assert process is not None
    assert process.argv == ()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/docker-abc.scope\n", "/system.slice/docker-abc.scope"),
        ("12:cpu:/x\n5:memory:/docker/abc\n0::/\n", "/docker/abc"),
        ("3:cpu,memory:/kubepods/pod1/c1\n", "/kubepods/pod1/c1"),
        ("", ""),
        ("garbage\n", ""),
    ],
)
def test_cgroups(tmp_path: Path, text: str, path: str) -> None:
    """The unified hierarchy where it says something, else the memory controller's."""
    write(tmp_path, 42, cgroup=text)
    process = Reader(str(tmp_path)).look(42, 0.0)
    assert process is not None
    assert process.cgroup == path


def test_a_loop_of_parents(tmp_path: Path) -> None:
    """A torn reading may make a process its own grandparent."""
    write(tmp_path, 42, ppid=43)
    write(tmp_path, 43, ppid=42)
    assert set(Reader(str(tmp_path)).families([42], 0.0)) == {42, 43}


@pytest.mark.parametrize("text", ["", "42", "42 (x", "42 (x) S", "42 (x) S a b c", "42 (x) S 1 0 0"])
def test_a_torn_stat(tmp_path: Path, text: str) -> None:
    """A stat file that makes no sense is a process that is not there."""
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "stat").write_text(text)
    assert Reader(str(tmp_path)).look(42, 0.0) is None


def test_servers_are_found_by_command_line(tmp_path: Path) -> None:
    """A command line is read once per process, and again when the process has become another program."""
    write(tmp_path, 42, comm="python3", cmdline=b"python3\0-m\0http.server\0")
    write(tmp_path, 43, comm="vllm", cmdline=b"vllm\0serve\0m\0")
    reader = Reader(str(tmp_path))
    serves = lambda argv: "serve" in argv  # noqa: E731
    assert [p.pid for p in reader.servers(serves)] == [43]
    write(tmp_path, 42, comm="vllm", cmdline=b"vllm\0serve\0m\0")
    (tmp_path / "43" / "stat").unlink()
    assert [p.pid for p in reader.servers(serves)] == [42]


def test_unreadable_root() -> None:
    """A /proc that is not there has no processes."""
    reader = Reader("/nonexistent")
    assert reader.families([1, 2], 0.0) == {}
    assert reader.servers(lambda argv: True) == []
    assert reader.listening(1) is None
    assert not reader.wsl()


STATUS = "Name:\tx\nUid:\t0\t0\t0\t0\nNSpid:\t42\t%s\nSigPnd:\t%s\nShdPnd:\t%s\n"


@pytest.mark.parametrize(
    ("state", "pending", "shared", "sigkill"),
    [
        ("D", "0000000000000100", "0000000000000000", True),
        ("D", "0000000000000000", "0000000000000100", True),
        ("R", "0000000000000000", "0000000000000100", True),
        ("D", "0000000000000000", "0000000000004000", False),
        ("S", "0000000000000100", "0000000000000000", False),
        ("D", "junk", "junk", False),
    ],
)
def test_pending_sigkill(tmp_path: Path, state: str, pending: str, shared: str, sigkill: bool) -> None:
    """SIGKILL pending, and the kernel stack of one that ignores it."""
    write(tmp_path, 42, state=state)
    (tmp_path / "42" / "status").write_text(STATUS % ("1", pending, shared))
    (tmp_path / "42" / "stack").write_text("[<0>] uvm_spin_loop+0x10/0x20 [nvidia_uvm]\n[<0>] do_exit\n")
    process = Reader(str(tmp_path)).look(42, 0.0)
    assert process is not None
    assert process.sigkill is sigkill
    assert ("uvm_spin_loop" in process.stack) is sigkill
    assert process.init, "PID 1 of its own namespace"


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "frozen"),
    [
        ("0::/docker/a\n", "docker/a/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/docker/a\n", "docker/a/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("5:memory:/docker/a\n3:freezer:/docker/a\n", "freezer/docker/a/freezer.state", "FROZEN\n", True),
        ("5:memory:/docker/a\n3:freezer:/docker/a\n", "freezer/docker/a/freezer.state", "THAWED\n", False),
        ("0::/\n", "cgroup.events", "frozen 1\n", False),
    ],
)
def test_frozen(tmp_path: Path, cgroup: str, file: str, text: str, frozen: bool) -> None:
    """Both generations of cgroups say it in a file of their own."""
    write(tmp_path, 42, cgroup=cgroup)
    path = tmp_path / "cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    process = Reader(str(tmp_path), cgroupfs=str(tmp_path / "cgroup")).look(42, 0.0)
    assert process is not None
    assert process.frozen is frozen


TCP = "sl\n   0: %s:1F40 %s:C350 01 00000000:00000000 00:00000000 00000000 0 0 777 1\n"


@pytest.mark.parametrize(
    ("table", "local", "peer", "remote"),
    [
        ("tcp", "0100007F", "0200007F", False),
        ("tcp", "0A00020A", "0A00020A", False),
        ("tcp", "0A00020A", "0B00020A", True),
        ("tcp6", "0" * 24 + "01000000", "0" * 24 + "01000000", False),
        ("tcp6", "0000000000000000FFFF00000A00020A", "0000000000000000FFFF00000B00020A", True),
        ("tcp6", "0000000000000000FFFF00000100007F", "0000000000000000FFFF00000200007F", False),
        ("tcp6", "B80D0120000000000000000001000000", "B80D012000000000000000000200007F", True),
    ],
)
def test_connections_to_other_hosts(tmp_path: Path, table: str, local: str, peer: str, remote: bool) -> None:
    """Another address that is not loopback is another host; the own address is not."""
    write(tmp_path, 42)
    (tmp_path / "42" / "fd").mkdir()
    (tmp_path / "42" / "fd" / "3").symlink_to("socket:[777]")
    (tmp_path / "42" / "net").mkdir()
    (tmp_path / "42" / "net" / table).write_text(TCP % (local, peer))
    assert Reader(str(tmp_path)).remote(42) is remote
    assert Reader(str(tmp_path)).remote(43) is None


def test_who_exists() -> None:
    """PID 1 exists though we may not signal it as somebody else; a PID beyond the limit does not."""
    assert Reader().exists(1)
    assert not Reader().exists(2**22 + 1)


def in_namespace(code: str, *flags: str, before: str = "true") -> str:
    """What *code* prints in fresh namespaces; skips where this machine has none."""
    need(os.geteuid() == 0, "root, for unshare")
    script = f"{before} && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["unshare", *flags, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"this machine has no such namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hidepid(tmp_path: Path) -> None:
    """A process that /proc hides from another user exists: it is not dead, and nothing is said about it."""
    code = f"""
import os
from gpu_oom_exporter.sources.procfs import Reader
os.setgroups([]); os.setgid(65534); os.setuid(65534)
reader = Reader("{tmp_path}/proc")
print(reader.look(1, 0.0), reader.exists(1))
"""
    (tmp_path / "proc").mkdir()
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    out = in_namespace(code, "--mount", before=f"mount -t proc -o hidepid=2 proc {tmp_path}/proc")
    assert out == "None True\n"


def test_a_pid_that_is_really_reused() -> None:
    """The same PID twice, by ns_last_pid in a fresh PID namespace: the second process is known to be another."""
    code = """
import subprocess, time
from gpu_oom_exporter.sources.procfs import Reader
reader = Reader(fresh_seconds=0.0)
one = subprocess.Popen(["sleep", "61"])
time.sleep(0.05)
first = reader.look(one.pid, 0.0)
one.kill(); one.wait()
open("/proc/sys/kernel/ns_last_pid", "w").write(str(one.pid - 1))
two = subprocess.Popen(["sleep", "62"])
time.sleep(0.05)
second = reader.look(two.pid, 0.0)
print(one.pid == two.pid, first.start_ticks != second.start_ticks, first.argv[1], second.argv[1])
two.kill()
"""
    out = in_namespace(code, "--pid", "--fork", "--mount-proc")
    if out.startswith("False"):
        pytest.skip("this kernel gave another PID")
    assert out == "True True 61 62\n"


def test_a_command_line_is_read_later(tmp_path: Path) -> None:
    """A process first seen in uninterruptible sleep, as a loading engine often is, gets its command line later."""
    write(tmp_path, 42, comm="vllm", state="D", cmdline=b"vllm\0serve\0m\0")
    reader = Reader(str(tmp_path))
    serves = lambda argv: "serve" in argv  # noqa: E731
    first = reader.look(42, 0.0)
    assert first is not None
    assert first.argv == ()
    assert reader.servers(serves) == []
    write(tmp_path, 42, comm="vllm", state="S", cmdline=b"vllm\0serve\0m\0")
    second = reader.look(42, 10.0)
    assert second is not None
    assert second.argv == ("vllm", "serve", "m")
    assert [p.pid for p in reader.servers(serves)] == [42]


def test_a_thread_that_waits_in_the_driver(tmp_path: Path) -> None:
    """The leader sleeps well while a thread of it holds the lock: the command line is left alone."""
    write(tmp_path, 42, state="S", cmdline=b"vllm\0serve\0")
    (tmp_path / "42" / "task").mkdir()
    write(tmp_path / "42" / "task", 43, state="D")
    process = Reader(str(tmp_path)).look(42, 0.0)
    assert process is not None
    assert process.argv == ()


def test_one_table_for_all_processes(tmp_path: Path) -> None:
    """The table of a network namespace is read once a pass, however many processes share it."""
    inodes = {42: 777, 43: 778}
    rows = "".join(f"  0: 0100007F:{1000 + p:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {i} 1\n" for p, i in inodes.items())
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "net").symlink_to("net:[1]")
    for pid, inode in inodes.items():
        write(tmp_path, pid)
        for folder in ("fd", "net", "ns"):
            (tmp_path / str(pid) / folder).mkdir()
        (tmp_path / str(pid) / "ns" / "net").symlink_to("net:[1]")
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (tmp_path / str(pid) / "net" / "tcp").write_text(f"sl\n{rows}")
    reader = Reader(str(tmp_path))
    reads = []
    plain = reader._bytes
    reader._bytes = lambda path: (reads.append(path), plain(path))[1]  # type: ignore[method-assign,func-returns-value]
    found = reader.families([42, 43], 0.0)
    assert {pid: p.listening for pid, p in found.items()} == {42: {1042}, 43: {1043}}
    assert sum(path.endswith("net/tcp") for path in reads) == 1


def test_a_process_seen_before_its_exec() -> None:
    """Seen between fork and exec it has its parent's command line; the second look has its own."""
    code = "import os, sys; sys.stdin.readline(); os.execv(sys.executable, [sys.executable, '-c', 'input()', 'vllm', 'serve'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        reader = Reader()
        first = reader.look(child.pid, 0.0)
        assert first is not None
        serves = lambda argv: argv[-2:] == ("vllm", "serve")  # noqa: E731
        assert reader.servers(serves) == []
        child.stdin.write("\n")
        child.stdin.flush()
        wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().endswith(b"serve\0"))
        second = reader.look(child.pid, 10.0)
        assert second is not None
        assert (first.comm, first.start_ticks) == (second.comm, second.start_ticks)
        assert serves(second.argv)
        assert [p.pid for p in reader.servers(serves)] == [child.pid]
        child.kill()
