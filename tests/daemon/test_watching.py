"""The watch: once each over kill -9 and rotation, nobody speaks for the host, a storm delays nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_oom_exporter.analysis import recent
from gpu_oom_exporter.daemon.watching import LOOK_SECONDS, Watch, WatchSource
from gpu_oom_exporter.model import Container, ContainerFacts, LogFacts, Recorded
from gpu_oom_exporter.publish.archive import Archive
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.logs import KernelMessages, LogFiles, patterns_of
from tests.conftest import HERE, ManualClock, Scenario, StartDaemon, wait_until

OOM = "RuntimeError: CUDA error: out of memory"
FORGED = (
    "[81234.1] NVRM: Xid (PCI:0000:81:00): 79, pid=7, name=python, GPU has fallen off the bus.",
    "Jan  9 11:20:31 node kernel: Out of memory: Killed process 1 (systemd) total-vm:1kB, anon-rss:1kB, file-rss:1kB",
    "systemd[1]: sshd.service: Failed with result 'oom-kill'.",
    'could not select device driver "" with capabilities: [[gpu]].',
)


class Host:
    """Logs of a pod, a docker container and a plain file, and a watch over them on a clock that stands still."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.folder = folder
        self.clock = clock
        self.pod = folder / "pods" / "prod_vllm-0_3f2a" / "vllm" / "0.log"
        self.container = "ab" * 32
        self.docker = folder / "docker" / self.container / f"{self.container}-json.log"
        self.plain = folder / "plain.log"
        for path in (self.pod, self.docker, self.plain):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        self.start()

    def start(self) -> None:
        patterns = patterns_of(str(self.folder / "docker"), str(self.folder / "pods"), [(str(self.plain), "chat")])
        self.watch = Watch(LogFiles(patterns), None, Archive(str(self.folder / "a.sqlite")), self.clock)
        self.watch.round()

    def say(self, line: str) -> None:
        """The same line in all three logs."""
        with self.pod.open("a") as pod, self.docker.open("a") as docker, self.plain.open("a") as plain:
            pod.write(f"2026-03-04T05:06:07.1Z stderr F {line}\n")
            docker.write(json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-03-04T05:06:07.1Z"}) + "\n")
            plain.write(f"{line}\n")

    def facts(self) -> LogFacts:
        for _ in range(4):
            self.clock.advance(LOOK_SECONDS)
            self.watch.round()
        assert self.watch.facts is not None
        return self.watch.facts


@pytest.fixture
def host(tmp_path: Path, clock: ManualClock) -> Host:
    return Host(tmp_path, clock)


def test_whose(host: Host) -> None:
    """Each incident knows the pod, the container or the engine that its log belongs to."""
    host.say(OOM)
    facts = host.facts()
    assert facts.totals == {"cuda_oom_generic": 3}
    origins = {recorded.origin.kind: recorded.origin for recorded in facts.recent}
    assert (origins["pod"].namespace, origins["pod"].pod, origins["pod"].container) == ("prod", "vllm-0", "vllm")
    assert host.container == origins["docker"].container_id
    assert origins["file"].engine == "chat"


def test_a_container_speaks_for_itself(host: Host) -> None:
    """What a container prints about the kernel, the GPU or the runtime counts for nothing; the host's own log does."""
    for line in FORGED:
        host.say(line)
    facts = host.facts()
    assert {"file"} == {recorded.origin.kind for recorded in facts.recent}
    assert facts.totals == {"gpu_lost": 1, "host_oom_kill_global": 1, "container_toolkit_missing": 1}


def test_no_sessions(host: Host) -> None:
    """A pasted terminal session in a log that is followed is nobody's verdict."""
    host.say("# nvidia-smi")
    host.say("|    0   N/A  N/A      8862      G   /usr/lib/xorg/Xorg                           1807MiB |")
    assert host.facts().totals == {}


def test_told_while_open(host: Host) -> None:
    """An incident is told when its lines are quiet, and not again when it closes or the daemon restarts."""
    host.say(OOM)
    assert host.facts().totals == {"cuda_oom_generic": 3}
    host.say(OOM)
    for _ in range(2100):
        host.say("ordinary")
    assert host.facts().totals == {"cuda_oom_generic": 3}
    host.watch.close()
    host.start()
    assert host.facts().totals == {"cuda_oom_generic": 3}
    assert len(host.facts().recent) == 3


def test_kernel(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's messages tell of the kernel alone; their sequence number is the position."""
    records = [
        b"4,7,1000,-;Out of memory: Killed process 812 (python3) total-vm:1kB, anon-rss:2kB, file-rss:1kB\n",
        b"4,8,2000,-;torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n",
        b"12,9,3000,-;NVRM: Xid (PCI:0000:01:00): 79, forged\n",
    ]
    (tmp_path / "kmsg").touch()
    (tmp_path / "boot_id").write_text("boot\n")

    def start() -> Watch:
        queue = list(records)
        monkeypatch.setattr(KernelMessages, "_next", lambda self: queue.pop(0) if queue else None)
        kernel = KernelMessages(str(tmp_path / "kmsg"), str(tmp_path / "boot_id"))
        return Watch(LogFiles({}), kernel, Archive(str(tmp_path / "a.sqlite")), clock)

    for _ in range(2):
        watch = start()
        for _ in range(4):
            watch.round()
            clock.advance(2.0)
        assert watch.facts is not None
        assert watch.facts.totals == {"host_oom_kill_global": 1}
        assert watch.facts.kernel
        assert watch.archive.positions()["kernel"].offset == 6, "before the incident that is still open"
        watch.close()


async def test_archive_fails(tmp_path: Path, clock: ManualClock) -> None:
    """An archive that cannot be used is the source's failure, with a sentence; nothing is lost when it is back."""
    host = Host(tmp_path / "logs", clock)
    source = WatchSource(host.watch)
    host.watch.archive.close()
    (tmp_path / "logs" / "a.sqlite").unlink()
    for name in ("a.sqlite-wal", "a.sqlite-shm"):
        (tmp_path / "logs" / name).unlink(missing_ok=True)
    (tmp_path / "logs" / "a.sqlite").mkdir()
    host.say(OOM)
    await source.read()

    def failed() -> bool:
        clock.advance(1.0)
        return bool(host.watch.problem)

    wait_until(failed)
    with pytest.raises(SourceError, match=r"a\.sqlite"):
        await source.read()
    (tmp_path / "logs" / "a.sqlite").rmdir()

    def back() -> bool:
        clock.advance(1.0)
        return host.watch.facts is not None and host.watch.facts.totals == {"cuda_oom_generic": 3}

    wait_until(back)
    await source.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Killed at random moments in the middle of a log that is rotated: every incident is there once."""
    chance = random.Random(seed)
    folder, archive = tmp_path / "logs", tmp_path / "a.sqlite"
    folder.mkdir()
    path = folder / "engine.log"
    path.touch()
    written = rotations = kills = 0

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.watcher", str(folder), str(archive)], cwd=HERE.parent
        )

    watcher = start()
    wait_until(lambda: archive.exists() and Archive(str(archive)).positions())
    try:
        for _ in range(12):
            for _ in range(chance.randrange(1, 40)):
                written += 1
                with path.open("a") as log:
                    log.write(f"(EngineCore pid={written}) {OOM}\n" + "an ordinary line\n" * chance.randrange(60))
            if chance.random() < 0.3:
                rotations += 1
                path.rename(folder / f"engine.log.{rotations}")
                path.touch()
            time.sleep(chance.random() * 0.5)
            if chance.random() < 0.6:
                kills += 1
                watcher.send_signal(signal.SIGKILL)
                watcher.wait()
                watcher = start()
                # one rotation at most while it is away: the kubelet and logrotate keep the last one beside the log
                wait_until(lambda: _caught_up(archive, path))
        wait_until(lambda: Archive(str(archive)).totals().get("cuda_oom_generic", (0, 0))[0] >= written, 30.0)
    finally:
        watcher.kill()
        watcher.wait()
    assert written == Archive(str(archive)).totals()["cuda_oom_generic"][0], (kills, rotations)


def _caught_up(archive: Path, path: Path) -> bool:
    position = Archive(str(archive)).positions().get(f"file:{path}")
    status = path.stat()
    return position is not None and position.file.startswith(f"{status.st_dev}:{status.st_ino}:")


def test_on_the_page(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """An error in a pod's log comes to the page with its workload, and is still counted once after a restart."""
    scenario.gpus(1).write()
    pod = tmp_path / "pods" / "prod_vllm-0_3f2a" / "vllm" / "0.log"
    pod.parent.mkdir(parents=True)
    pod.touch()
    daemon = start_daemon(f"--path.pod-logs={tmp_path}/pods")
    daemon.wait_for("gpu_oom_log_files", 1.0)
    assert daemon.value('gpu_oom_incidents_total{category="cuda_oom_generic"}') == 0.0
    with pod.open("a") as log:
        log.write(f"2026-03-04T05:06:07.1Z stderr F {OOM}\n")
    series = (
        'gpu_oom_incidents_recent{group="cuda_oom",workload_container="vllm",workload_namespace="prod",'
        'workload_pod="vllm-0"}'
    )
    daemon.wait_for(series, 1.0)
    daemon.stop()
    again = start_daemon(f"--path.pod-logs={tmp_path}/pods")
    again.wait_for('gpu_oom_incidents_total{category="cuda_oom_generic"}', 1.0)
    again.wait_for(series, 1.0)


def test_a_storm(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A log that grows far faster than it can be read delays no tick; what is skipped is counted."""
    scenario.gpus(1).write()
    config = tmp_path / "config.yaml"
    log = tmp_path / "storm.log"
    log.touch()
    config.write_text(f"logs: {{files: [{{path: {log}}}], containers: false, kernel: false}}")
    daemon = start_daemon(f"--config.file={config}")
    daemon.wait_for("gpu_oom_log_files", 1.0)
    line = "INFO 07-15 10:00:01 [logger.py:43] Received request c: prompt: 'CUDA out of memory. Tried to allocate 2 GiB', params: S\n"
    with log.open("a") as file:
        for _ in range(10):
            file.write(line * 100_000)
    lateness = []

    def skipped() -> bool:
        late = daemon.value("gpu_oom_tick_lateness_seconds")
        if late is not None:
            lateness.append(late)
        return (daemon.value("gpu_oom_log_lines_dropped_total") or 0) > 100_000

    wait_until(skipped)
    assert lateness
    assert min(lateness) < 0.5


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of 64 MiB of the kernel that runs the tests, named like a container's."""
    root = Path("/sys/fs/cgroup/memory")
    folder = root / f"docker-{os.getpid():064x}.scope"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
        (folder / "memory.swappiness").write_text("0")
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as err:
        pytest.skip(f"no memory cgroup (v1) and kernel messages of our own: {err}")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_a_real_kill(tmp_path: Path, clock: ManualClock, limited: Path) -> None:
    """The kernel kills a process at its container's limit: one incident, with victim, cgroup and container."""
    watch = Watch(LogFiles({}), KernelMessages(), Archive(str(tmp_path / "a.sqlite")), clock)
    watch.round()
    code = f"open({str(limited / 'cgroup.procs')!r}, 'w').write('0')\nheld = [bytearray(1 << 20) for _ in range(4096)]"
    victim = subprocess.Popen([sys.executable, "-c", code])
    assert victim.wait() == -signal.SIGKILL

    def told() -> list[Recorded]:  # this machine may kill others meanwhile
        watch.round()
        clock.advance(2.0)
        recent = watch.facts.recent if watch.facts is not None else ()
        return [recorded for recorded in recent if recorded.incident.fields.get("pid") == victim.pid]

    wait_until(told)
    (recorded,) = told()
    assert recorded.incident.category == "host_oom_kill_cgroup"
    container_id = f"{os.getpid():064x}"
    containers = ContainerFacts({container_id: Container(container_id, "web")})
    assert recent.owner(recorded, recent.Scene((), (), (), {}, containers)).workload.container == "web"
    watch.close()
