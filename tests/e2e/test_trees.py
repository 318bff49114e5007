"""Real process trees: servers that are killed, zombies, stops, freezes; `holders` and `release` on them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_oom_exporter.act.release import Changed, carry_out
from gpu_oom_exporter.analysis.releasing import Plan
from gpu_oom_exporter.model import Cause, Holder, NvmlFacts, Place
from gpu_oom_exporter.sources.procfs import Reader as ProcReader
from tests.analysis.facts import PLACE, Thinker, gpu, on_gpu
from tests.conftest import COMMAND, GIB, MIB, Scenario, need, wait_until
from tests.e2e.test_captures import build_proc
from tests.sources.test_containers import docker

pytestmark = pytest.mark.skipif(
    not ProcReader().host_pids(), reason="this machine's tests run outside the host's PID namespace: no verdicts there"
)

# a subreaper called tini → `vllm serve` → EngineCore → worker; prints the three PIDs
TREE = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
open("/proc/self/comm", "w").write("tini")
server = '''
import subprocess, sys, time
core = subprocess.Popen(["perl", "-e", sys.argv[-1]], stdout=subprocess.PIPE, text=True)
print(core.pid, core.stdout.readline().strip(), flush=True)
time.sleep(600)
'''
core = 'my $w = fork(); if (!$w) {{ $0 = "VLLM::Worker_TP0"; {worker} sleep 600; exit }} $0 = "VLLM::EngineCore"; {core} $| = 1; print "$w\\\\n"; sleep 600;'
child = subprocess.Popen([sys.executable, "-c", server, "vllm", "serve", "m", "--port", "{port}", core], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
while True:
    try: os.wait()
    except ChildProcessError: time.sleep(0.05)
"""


@dataclass
class Tree:
    top: subprocess.Popen[str]
    server: int
    core: int
    worker: int


def plant(core: str = "", worker: str = "") -> Iterator[Tree]:
    need(Path("/usr/bin/perl").exists(), "perl")
    code = TREE.format(core=core, worker=worker, port=18999)
    # a session of its own: whatever else runs in ours must not count as a relative
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as top:
        assert top.stdout is not None
        server, core_pid, worker_pid = map(int, top.stdout.readline().split())
        wait_until(lambda: b"Worker" in Path(f"/proc/{worker_pid}/cmdline").read_bytes())
        wait_until(lambda: b"EngineCore" in Path(f"/proc/{core_pid}/cmdline").read_bytes())
        try:
            yield Tree(top, server, core_pid, worker_pid)
        finally:
            for pid in (worker_pid, core_pid, server, top.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@pytest.fixture
def tree() -> Iterator[Tree]:
    yield from plant()


@pytest.fixture
def stubborn() -> Iterator[Tree]:
    """A tree whose workers ignore SIGTERM."""
    yield from plant("$SIG{TERM} = q(IGNORE);", "$SIG{TERM} = q(IGNORE);")


def kill_server(tree: Tree) -> None:
    os.kill(tree.server, signal.SIGKILL)
    wait_until(lambda: ProcReader().stat(tree.core)[2] == tree.top.pid)  # type: ignore[index]


def run(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments, f"--storage.path={tmp_path}/storage", "--path.sysfs=/nonexistent"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def holders(tmp_path: Path) -> list[dict[str, object]]:
    done = run("holders", "--output=json", "--confirm-seconds=0.3", tmp_path=tmp_path)
    return json.loads(done.stdout)["gpus"][0]["holders"]  # type: ignore[no-any-return]


def test_a_killed_api_server(tree: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """Under its server the worker is an engine; after SIGKILL of the server it is an orphan, and says why."""
    scenario.gpus().process(tree.worker, 9 * GIB).write()
    (before, _) = holders(tmp_path)
    assert (before["holder"], before["cause"], before["evidence"]) == ("engine", None, [])
    kill_server(tree)
    (after, rest) = holders(tmp_path)
    assert (after["holder"], after["cause"]) == ("orphan", "engine_orphan")
    assert f"its parent is PID {tree.top.pid} (tini)" in after["evidence"]  # type: ignore[operator]
    assert after["remedy"] == [f"gpu-oom-exporter release {tree.worker}"]
    assert (rest["pid"], rest["holder"], rest["used_bytes"]) == (None, "unattributed", GIB)
    text = run("holders", "--confirm-seconds=0.3", tmp_path=tmp_path)
    assert text.returncode == 1
    assert "engine_orphan" in text.stdout
    assert all(len(line) <= 80 for line in text.stdout.splitlines())


def test_release_frees_an_orphan(tree: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """Plan first, nothing done; with --yes the root of the tree is ended and the freed bytes are measured."""
    scenario.gpus().process(tree.worker, 9 * GIB).add("follow").write()
    kill_server(tree)
    plan = run("release", str(tree.worker), tmp_path=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert f"send SIGTERM to PID {tree.core}" in plan.stdout
    assert "Nothing was done" in plan.stdout
    assert ProcReader().stat(tree.worker) is not None
    # the worker of a real vLLM follows its EngineCore through a pipe; perl's needs its own end
    os.kill(tree.worker, signal.SIGSTOP)
    os.kill(tree.worker, signal.SIGCONT)
    done = run("release", str(tree.worker), "--yes", "--grace-seconds=5", "--output=json", tmp_path=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["done"] is True
    wait_until(lambda: ProcReader().stat(tree.core) is None)
    again = json.loads(run("release", str(tree.worker), "--yes", "--output=json", tmp_path=tmp_path).stdout)
    assert again["done"] is True
    assert again["freed_bytes"] == 9 * GIB
    wait_until(lambda: ProcReader().stat(tree.worker) is None)


def test_release_of_one_that_ignores_sigterm(stubborn: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """After the grace comes SIGKILL, and the bytes really freed are told."""
    scenario.gpus().process(stubborn.core, 9 * GIB).add("follow").write()
    kill_server(stubborn)
    done = run("release", str(stubborn.core), "--yes", "--grace-seconds=0.5", tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sent SIGTERM to PID {stubborn.core}" in done.stdout
    assert f"sent SIGKILL to PID {stubborn.core}" in done.stdout
    assert "Freed 9.0 GiB." in done.stdout


def test_release_refuses_a_serving_engine(tree: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """A worker under its server is part of a living engine: refused without --force, and nothing is sent."""
    scenario.gpus().process(tree.worker, 9 * GIB).write()
    done = run("release", str(tree.worker), "--yes", tmp_path=tmp_path)
    assert done.returncode == 1
    assert "living engine" in done.stdout
    assert ProcReader().stat(tree.worker) is not None


@pytest.mark.parametrize(
    ("pid", "sentence", "status"),
    [
        ("abc", "invalid int value: 'abc'", 2),
        ("0", "0 is not a process ID", 2),
        ("-5", "-5 is not a process ID", 2),
        ("1", "PID 1 is never touched", 1),
        ("4194303", "holds no memory of any GPU", 1),
        ("self", "that is this tool, or what started it", 1),
        ("dead", "no signal can help", 1),
    ],
)
def test_release_of_the_wrong_thing(pid: str, sentence: str, status: int, scenario: Scenario, tmp_path: Path) -> None:
    """Each mistake has its sentence and exit code."""
    scenario.gpus().process(4194302, 9 * GIB).write()
    number = {"self": str(os.getpid()), "dead": "4194302"}.get(pid, pid)
    done = run("release", number, "--yes", tmp_path=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_release_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver nothing can be verified."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = run("release", "4194302", tmp_path=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("No GPU can be read: libnvidia-ml")


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# to find the interpreter below a home folder that is closed to others; it opens no other process's descriptors
NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def as_nobody(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the program as another user."""
    need(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv, to become somebody else")
    command = [*NOBODY, *COMMAND, *arguments, f"--storage.path={tmp_path}/nobody", "--path.sysfs=/nonexistent"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_release_without_root(tree: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """Another user's process is refused, with whose it is."""
    scenario.gpus().process(tree.top.pid, 9 * GIB).write()
    done = as_nobody("release", str(tree.top.pid), tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (1, "Refused: it belongs to root; run as root, or ask them.\n"), (
        done.stderr
    )


def test_holders_without_root(tree: Tree, scenario: Scenario, tmp_path: Path) -> None:
    """Without root no engine of another user is called an orphan, and the output says what could not be seen."""
    scenario.gpus().process(tree.worker, 9 * GIB).write()
    kill_server(tree)
    done = as_nobody("holders", "--confirm-seconds=0.3", tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine_orphan" not in done.stdout
    assert "not seen (not root)" in done.stdout


async def test_a_reused_pid_is_not_signalled(tree: Tree) -> None:
    """Start time and cgroup are verified right before the signal."""
    proc = ProcReader(fresh_seconds=0.0)
    stat = proc.stat(tree.core)
    assert stat is not None

    async def measure() -> None:
        return None

    wrong = Plan(tree.core, tree.core, start_ticks=stat[3] + 1, places=(PLACE,))
    with pytest.raises(Changed, match="is another process now"):
        await carry_out(wrong, measure, proc, 0.1)
    moved = Plan(tree.core, tree.core, start_ticks=stat[3], cgroup="/elsewhere", places=(PLACE,))
    with pytest.raises(Changed, match="moved to another cgroup"):
        await carry_out(moved, measure, proc, 0.1)
    gone = Plan(4194301, 4194301, start_ticks=1, places=(PLACE,))
    with pytest.raises(Changed, match="has ended by itself"):
        await carry_out(gone, measure, proc, 0.1)
    assert proc.stat(tree.core) is not None


def judged(pid: int, seconds: float = 200.0) -> tuple[Cause | None, Holder, tuple[str, ...]]:
    """The verdict on a real process, as the daemon would reach it after *seconds*."""
    proc = ProcReader(fresh_seconds=0.0)
    think = Thinker()
    for step in range(0, int(seconds) + 1, 10):
        processes = proc.families([pid], float(step))
        dead = frozenset() if pid in processes or proc.exists(pid) else frozenset({pid})
        report = think(10.0, nvml=NvmlFacts("580", (gpu(on_gpu(pid, 9 * GIB)),), processes, dead=dead))
    (holding,) = report.ownership[PLACE].holdings
    return holding.cause, holding.holder, holding.evidence


def test_a_pid_that_is_gone() -> None:
    """A PID that nobody has."""
    child = subprocess.Popen(["true"])
    child.wait()
    assert judged(child.pid)[0] is Cause.DEAD_PID


def test_a_zombie_leader_with_a_live_thread() -> None:
    """The leader has ended, its thread holds the memory: defunct, and the thread is named."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); ctypes.CDLL(None).pthread_exit(None)"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: (ProcReader().stat(child.pid) or ("", ""))[1] == "Z")
        cause, holder, evidence = judged(child.pid)
        assert (cause, holder) == (Cause.DEFUNCT, Holder.ORPHAN)
        assert any("thread" in line and "still lives" in line for line in evidence)
    finally:
        child.kill()
        child.wait()


def test_a_plain_zombie() -> None:
    """A zombie that its parent does not collect."""
    child = subprocess.Popen(["true"])
    wait_until(lambda: (ProcReader().stat(child.pid) or ("", ""))[1] == "Z")
    cause, _, evidence = judged(child.pid)
    assert cause is Cause.DEFUNCT
    assert f"its parent {os.getpid()} has not collected it" in evidence
    child.wait()


def test_stopped(tree: Tree) -> None:
    """SIGSTOP on an orphan: suspended, whatever its parent."""
    kill_server(tree)
    assert judged(tree.core)[0] is Cause.ENGINE_ORPHAN
    os.kill(tree.core, signal.SIGSTOP)
    wait_until(lambda: ProcReader().stat(tree.core)[1] == "T")  # type: ignore[index]
    assert judged(tree.core)[:2] == (None, Holder.SUSPENDED)


def test_frozen_cgroup(tree: Tree, tmp_path: Path) -> None:
    """A frozen cgroup v2 shows state S: its own file says that it is frozen."""
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.procs").exists() or not os.access(root / "cgroup.procs", os.W_OK):
        pytest.skip("no writable cgroup v2 here")
    group = root / f"gpu-oom-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(tree.core))
        (group / "cgroup.freeze").write_text("1")
    except OSError as err:
        pytest.skip(f"cgroup v2 cannot be used here: {err}")
    try:
        kill_server(tree)
        wait_until(lambda: "frozen 1" in (group / "cgroup.events").read_text())
        assert judged(tree.core)[:2] == (None, Holder.SUSPENDED)
    finally:
        (group / "cgroup.freeze").write_text("0")
        (root / "cgroup.procs").write_text(str(tree.core))
        time.sleep(0.05)
        group.rmdir()


def test_a_connection_to_another_host(tree: Tree) -> None:
    """What cannot be shown with a real second host is shown by /proc's own words: loopback does not count."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert ProcReader().remote(os.getpid()) is False


def test_the_library_of_a_living_program() -> None:
    """LLM() in a program: its worker hangs on the program, not on an adopter."""
    code = 'import subprocess, time; p = subprocess.Popen(["perl", "-e", "$0 = q(VLLM::EngineCore); sleep 600"]); print(p.pid, flush=True); time.sleep(600)'
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        wait_until(lambda: b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
        try:
            assert judged(pid)[:2] == (None, Holder.ENGINE)
        finally:
            os.kill(pid, signal.SIGKILL)
            program.kill()


def test_holders_bad_input(scenario: Scenario, tmp_path: Path) -> None:
    """A GPU that is not here, and a patience that is none."""
    scenario.gpus().write()
    done = run("holders", "--gpu=7", "--confirm-seconds=0", tmp_path=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, "gpu-oom-exporter: --gpu: no GPU '7' is here; there are 0")
    done = run("holders", "--confirm-seconds=-1", tmp_path=tmp_path)
    assert (done.returncode, "--confirm-seconds: -1 is not between" in done.stderr) == (2, True)
    by_address = run("holders", "--gpu=0000:1a:00.0", "--confirm-seconds=0", "--output=json", tmp_path=tmp_path)
    assert json.loads(by_address.stdout)["gpus"][0]["total_bytes"] == 80 * GIB


def test_holders_watch() -> None:
    """The live view shows growth and ends cleanly."""
    with subprocess.Popen(
        [*COMMAND, "holders", "--demo", "--watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watch:
        time.sleep(3.5)
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=10)
    assert watch.returncode == 0, err
    assert "PER MIN" in out
    assert "Traceback" not in err


CONTAINER = "c" * 64


def staged(
    pid: int, comm: str, state: str = "S", ppid: int = 1, cgroup: str = "/", pending: str = "0"
) -> dict[str, object]:
    """One process of a made-up /proc, in a session of its own, without sockets."""
    return {
        "stat": f"{pid} ({comm}) {state} {ppid} {pid} {pid}{' 0' * 15} {pid}{' 0' * 30}\n",
        "status": f"Name:\t{comm}\nUid:\t0\t0\t0\t0\nNSpid:\t{pid}\nSigPnd:\t{pending}\nShdPnd:\t0\n",
        "cmdline": f"{comm}\0",
        "cgroup": f"0::{cgroup}\n",
        "net/tcp": "sl\n",
        "stack": "[<0>] uvm_spin_loop+0x10/0x20 [nvidia_uvm]\n" if pending != "0" else "",
        "sockets": [],
    }


async def test_holders_names_every_cause(scenario: Scenario, tmp_path: Path) -> None:
    """One GPU with an orphan of every cause and a look-alike of each; what cannot be made for real is staged."""
    shim = 4190020
    host = {
        4190001: staged(4190001, "VLLM::EngineCor"),
        4190002: staged(4190002, "python3", "Z", shim),
        4190003: staged(4190003, "python3", "D", shim, pending="100"),
        4190004: staged(4190004, "python3", ppid=shim, cgroup=f"/system.slice/docker-{CONTAINER}.scope"),
        4190006: staged(4190006, "VLLM::EngineCor", "T"),
        4190007: staged(4190007, "python3", "D", shim),
        4190008: staged(4190008, "python3", ppid=shim, cgroup=f"/system.slice/docker-{'d' * 64}.scope"),
        shim: staged(shim, "containerd-shim"),
    }
    root = build_proc(tmp_path / "proc", {str(pid): files for pid, files in host.items()})
    scenario.gpus(used=40 * GIB)
    for pid in (*host, 4190005):
        if pid != shim:
            scenario.process(pid, 4 * GIB)
    scenario.write()
    known = json.dumps([{"Id": "d" * 64, "Names": ["/trainer"], "State": "running", "Labels": {}}])
    async with docker(tmp_path, known.encode()) as socket:
        command = [*COMMAND, "holders", "--output=json", "--confirm-seconds=2.5", f"--path.procfs={root}"]
        command += [f"--path.docker-socket={socket}", f"--storage.path={tmp_path}/s", "--path.sysfs=/nonexistent"]
        done = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await done.communicate()
    assert done.returncode == 1
    (gpu_told,) = json.loads(out)["gpus"]
    print(json.dumps(gpu_told, indent=1))
    told = {holder["pid"]: (holder["holder"], holder["cause"], holder["container"]) for holder in gpu_told["holders"]}
    assert told == {
        4190001: ("orphan", "engine_orphan", None),
        4190002: ("orphan", "defunct", None),
        4190003: ("orphan", "stuck", None),
        4190004: ("orphan", "container_gone", f"docker:{CONTAINER[:12]}"),
        4190005: ("orphan", "dead_pid", None),
        4190006: ("suspended", None, None),
        4190007: ("process", None, None),
        4190008: ("process", None, "trainer"),
        None: ("unattributed", None, None),
    }
    assert sum(holder["used_bytes"] for holder in gpu_told["holders"]) == 40 * GIB
    assert all(len(holder["evidence"]) >= 2 and holder["remedy"] for holder in gpu_told["holders"] if holder["cause"])


def test_every_cause_adds_up(scenario: Scenario, tmp_path: Path) -> None:
    """A host with several causes at once: the sum of the orphans is what the holder `orphan` has."""
    think = Thinker()
    zombie = subprocess.Popen(["true"])
    wait_until(lambda: (ProcReader().stat(zombie.pid) or ("", ""))[1] == "Z")
    proc = ProcReader(fresh_seconds=0.0)
    processes = proc.families([zombie.pid, os.getpid()], 0.0)
    facts = (on_gpu(zombie.pid, 3 * GIB), on_gpu(4194300, 2 * GIB), on_gpu(os.getpid(), 700 * MIB))
    for _ in range(8):
        report = think(10.0, nvml=NvmlFacts("1", (gpu(*facts),), processes, dead=frozenset({4194300})))
    owned = report.ownership[Place("0", "GPU-0")]
    assert owned.orphaned is not None
    assert owned.held is not None
    assert (owned.orphaned[Cause.DEFUNCT], owned.orphaned[Cause.DEAD_PID]) == (3 * GIB, 2 * GIB)
    assert owned.held[Holder.ORPHAN] == sum(owned.orphaned.values()) == 5 * GIB
    zombie.wait()
