"""The real daemon in its own process: faults of the driver and the host, and how it starts and stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import COMMAND, GIB, MIB, Daemon, Scenario, StartDaemon, sysfs, wait_until

GPU = [f'UUID="GPU-0000000{n}-aaaa-bbbb-cccc-dddddddddddd",gpu="{n}"' for n in range(4)]


def free(index: int) -> str:
    return f"gpu_oom_vram_free_bytes{{{GPU[index]}}}"


def up(index: int) -> str:
    return f"gpu_oom_gpu_up{{{GPU[index]}}}"


def test_a_reading_reaches_the_page(scenario: Scenario, start_daemon: StartDaemon) -> None:
    """Four GPUs over real pynvml, and a change of what is used within a few ticks."""
    scenario.gpus(4).write()
    daemon = start_daemon()
    assert [daemon.value(up(n)) for n in range(4)] == [1.0] * 4
    assert daemon.value(free(0)) == 70 * GIB - 600 * MIB
    scenario.lines[0] = scenario.lines[0].replace(f" {10 * GIB} ", f" {20 * GIB} ")
    scenario.write()
    daemon.wait_for(free(0), 60 * GIB - 600 * MIB)
    assert daemon.value('gpu_oom_source_up{source="nvml"}') == 1.0


def test_one_gpu_is_lost(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Its `up` is 0 and it tells nothing else; the other three are untouched; also after a restart."""
    addresses = [f"0000:{0x1A + 16 * n:02x}:00.0" for n in range(4)]
    root = sysfs(tmp_path / "sys", *addresses)
    scenario.gpus(4).write()
    daemon = start_daemon(f"--path.sysfs={root}")
    scenario.add("error * 2 15").write()
    daemon.wait_for(up(2), 0.0)
    assert [daemon.value(free(n)) is None for n in range(4)] == [False, False, True, False]
    assert [daemon.value(up(n)) for n in (0, 1, 3)] == [1.0] * 3
    daemon.stop()
    scenario.without("error").without("gpu 3").write()
    daemon = start_daemon(f"--path.sysfs={root}")
    assert daemon.value('gpu_oom_gpu_up{gpu="00000000:4A:00.0"}') == 0.0


@pytest.mark.parametrize("kind", ["none", "text", "no driver"])
def test_without_nvml(kind: str, scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """No library, a file that is none, a library without a driver: the page is there and says so."""
    library = tmp_path / "library"
    library.mkdir()
    if kind == "text":
        (library / "libnvidia-ml.so.1").write_text("no library")
    environment = {} if kind == "no driver" else {"LD_LIBRARY_PATH": str(library)}
    scenario.add("error nvmlInitWithFlags * 9").write()
    daemon = start_daemon(environment=environment)
    assert daemon.value('gpu_oom_source_up{source="nvml"}') == 0.0
    expected = "no_driver" if kind == "no driver" else "no_library"
    assert daemon.value(f'gpu_oom_source_failures_total{{reason="{expected}",source="nvml"}}')
    assert daemon.value('gpu_oom_source_up{source="host"}') == 1.0
    assert "gpu_oom_vram" not in daemon.get()[1]
    assert daemon.log().count("source failed") == 1, "logged when it begins, not every tick"


def test_zero_gpus(scenario: Scenario, start_daemon: StartDaemon) -> None:
    """A driver without a GPU is no failure."""
    scenario.write()
    daemon = start_daemon()
    assert daemon.value('gpu_oom_source_up{source="nvml"}') == 1.0
    assert "gpu_oom_gpu_up" not in daemon.get()[1]


CONFIG = "nvml: {deadline_seconds: 0.5, period_seconds: 0.2}\n"


def test_a_hung_call(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A call that hangs for an hour: the page goes on and says stuck, scrapes stay quick, and a stop takes
    under two seconds; when the driver answers again, so does the page."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    scenario.gpus().write()
    daemon = start_daemon(f"--config.file={config}")
    scenario.add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
    daemon.wait_for('gpu_oom_source_up{source="nvml"}', 0.0)
    assert daemon.value(free(0)) is None
    assert daemon.value('gpu_oom_source_failures_total{reason="stuck",source="nvml"}')
    began = time.monotonic()
    for _ in range(20):
        assert daemon.get()[0] == 200
    assert time.monotonic() - began < 5
    scenario.without("delay").write()
    daemon.wait_for(free(0), 70 * GIB - 600 * MIB)
    assert "source recovered" in daemon.log()
    scenario.add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
    daemon.wait_for('gpu_oom_source_up{source="nvml"}', 0.0)
    assert daemon.stop() < 2.0
    assert daemon.process.returncode == 0
    wait_until(lambda: not readers_of(daemon.process.pid))


def readers_of(parent: int) -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if int(stat[1]) == parent and b"nvml_reader" in command and stat[0] != "Z":
            found.append(int(pid))
    return found


def test_killed_with_a_stuck_reader(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """After kill −9 the reader hangs on; the next daemon serves at once, starts no second reader, and reads
    again when the first one has gone."""
    scenario.gpus().write()
    daemon = start_daemon()
    (reader,) = readers_of(daemon.process.pid)
    scenario.add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
    time.sleep(1.5)
    daemon.stop(signal.SIGKILL)
    assert Path(f"/proc/{reader}").exists()
    scenario.without("delay").write()
    successor = start_daemon()
    assert successor.value('gpu_oom_source_failures_total{reason="stuck",source="nvml"}')
    assert str(reader) in successor.log()
    assert readers_of(successor.process.pid) == []
    os.kill(reader, signal.SIGKILL)
    successor.wait_for(free(0), 70 * GIB - 600 * MIB)


def device_files(scenario: Scenario, *pids: int) -> int:
    count = 0
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        count += sum(os.readlink(f"{folder}/{fd}") == str(scenario.device_file) for fd in os.listdir(folder))
    return count


def test_release_by_signal(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """SIGUSR1 lets go of the driver until the marker is removed; the daemon itself never has it open."""
    scenario.gpus().write()
    daemon = start_daemon()
    pid = daemon.process.pid
    assert device_files(scenario, pid) == 0
    assert device_files(scenario, *readers_of(pid)) == 1
    daemon.process.send_signal(signal.SIGUSR1)
    daemon.wait_for('gpu_oom_source_up{source="nvml"}', 0.0)
    wait_until(lambda: not readers_of(pid))
    assert daemon.value(up(0)) is None, "a GPU that we let go of is not lost"
    (tmp_path / "storage" / "release-nvml").unlink()
    daemon.wait_for(up(0), 1.0)


def test_released_before_the_start(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A marker that is there at the start holds as well."""
    scenario.gpus().write()
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "release-nvml").touch()
    daemon = start_daemon()
    assert daemon.value('gpu_oom_source_failures_total{reason="released",source="nvml"}')


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop(scenario: Scenario, start_daemon: StartDaemon, number: signal.Signals) -> None:
    """Either signal ends it cleanly in under two seconds, mid-tick or not, and takes the reader along."""
    scenario.gpus().write()
    daemon = start_daemon()
    (reader,) = readers_of(daemon.process.pid)
    assert daemon.stop(number) < 2.0
    assert daemon.process.returncode == 0
    wait_until(lambda: not Path(f"/proc/{reader}").exists(), 2.0)
    assert "Traceback" not in daemon.log()


def test_stop_while_starting(scenario: Scenario, start_daemon: StartDaemon) -> None:
    """A nvmlInit that takes its time does not hold the stop, nor the page's own answer."""
    scenario.gpus().add("delay nvmlInitWithFlags * 5000").write()
    daemon = start_daemon(ready=False)
    status, sentence = daemon.get()
    assert (status, sentence) == (503, "Starting: not every source has been read yet.\n")
    assert daemon.get("/-/healthy")[0] == 200
    assert daemon.stop() < 2.0


BREAK = """
import os, time
if os.environ.get("BREAK_TICKS"):
    from gpu_oom_exporter import daemon
    plain = daemon.think
    def broken(snapshot, state, config):
        if os.path.exists(os.environ["BREAK_TICKS"]):
            WHAT
        return plain(snapshot, state, config)
    daemon.think = broken
    daemon.FROZEN_SECONDS = daemon.FROZEN_TICKS = 1.0
"""


def frozen_daemon(what: str, scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> tuple[Daemon, Path]:
    """A daemon whose ticks do *what* until the returned file is removed, once its page has turned 503."""
    (tmp_path / "sitecustomize.py").write_text(BREAK.replace("WHAT", what))
    flag = tmp_path / "broken"
    scenario.gpus().write()
    daemon = start_daemon(environment={"PYTHONPATH": str(tmp_path), "BREAK_TICKS": str(flag)})
    flag.touch()
    wait_until(lambda: daemon.get()[0] == 503)
    assert "Frozen" in daemon.get()[1]
    return daemon, flag


def test_failing_ticks(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """When ticks fail, the page turns 503 after its limit rather than showing old values; it is logged once."""
    daemon, flag = frozen_daemon("raise ZeroDivisionError('tick')", scenario, start_daemon, tmp_path)
    assert daemon.get("/-/healthy")[0] == 503
    assert daemon.log().count("tick failed") == 1
    flag.unlink()
    wait_until(lambda: daemon.get()[0] == 200)
    assert "tick recovered" in daemon.log()


def test_a_blocked_tick(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A tick that hangs for a minute blocks neither the answer, which turns 503, nor the stop."""
    daemon, _ = frozen_daemon("time.sleep(60)", scenario, start_daemon, tmp_path)
    assert daemon.stop() < 2.5


def test_every_dip_is_seen(scenario: Scenario, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Every reading ticks: a dip of a quarter of a second, read five times a second, is in the low-water mark."""
    config = tmp_path / "config.yaml"
    config.write_text("nvml: {period_seconds: 0.1}\n")
    scenario.gpus().write()
    daemon = start_daemon(f"--config.file={config}")
    low = f"gpu_oom_vram_headroom_min_bytes{{{GPU[0]}}}"
    plain = scenario.lines[0]
    scenario.lines[0] = plain.replace(f" {10 * GIB} ", f" {79 * GIB} ")
    scenario.write()
    time.sleep(0.25)
    scenario.lines[0] = plain
    scenario.write()
    daemon.wait_for(low, GIB - 600 * MIB, 5.0)


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=30, env={**os.environ, **(environment or {})}
    )


def test_port_in_use() -> None:
    """One sentence that says what to do, exit 2."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("--demo", f"--web.listen-address=127.0.0.1:{port}")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"gpu-oom-exporter: cannot listen on 127.0.0.1:{port}: ")
    assert "--web.listen-address" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config.file=/nonexistent/c.yaml"], "/nonexistent/c.yaml: No such file or directory"),
        (["--config.file=/proc"], "/proc: Is a directory"),
        (["--config.file=BAD"], "BAD: nvml.period_seconds: input should be greater than or equal to 0.1, not -1"),
        (["--config.file=BINARY"], "BINARY: is not UTF-8 text"),
        (["--demo", "--config.file=BAD"], "--demo watches its own engines; leave out --config.file"),
        (["--demo", "--demo.speed=0"], "--demo.speed: 0 is not between 0.1 and 100"),
        (["--demo", "--demo.speed=nan"], "--demo.speed: nan is not between 0.1 and 100"),
        (["--demo", "--demo.speed=fast"], "argument --demo.speed: invalid float value: 'fast'"),
        (["--web.listen-address=nowhere"], "'nowhere' is not an address to listen on"),
        (["--web.telemetry-path=metrics"], "--web.telemetry-path: 'metrics' must begin with /"),
        (["--web.telemetry-path=/-/ready"], "--web.telemetry-path: '/-/ready' must begin with /"),
        (["--log.level=loud"], "argument --log.level: invalid choice: 'loud'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["no-such-command"], "invalid choice: 'no-such-command'"),
    ],
)
def test_misuse(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    """Each mistake is one clear message and exit 2."""
    (tmp_path / "BAD").write_text("nvml: {period_seconds: -1}")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unreadable_file(tmp_path: Path) -> None:
    """A file we may not read, as seen by somebody who is not root."""
    secret = tmp_path / "c.yaml"
    secret.write_text("{}")
    secret.chmod(0)
    if os.geteuid() != 0:
        done = run(f"--config.file={secret}")
    else:
        code = (
            "import os, sys, gpu_oom_exporter.cli as c; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
            f"sys.exit(c.main(['--config.file={secret}']))"
        )
        tmp_path.chmod(0o755)
        for parent in list(tmp_path.parents)[:-2]:
            parent.chmod(parent.stat().st_mode | 0o055)
        done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.strip() == f"gpu-oom-exporter: {secret}: Permission denied"


def test_config_check(tmp_path: Path) -> None:
    """A good file is checked without starting anything."""
    good = tmp_path / "c.yaml"
    good.write_text("engines: [{name: a, url: 'http://127.0.0.1:8000'}]")
    done = run("--config.check", f"--config.file={good}")
    assert (done.returncode, done.stdout) == (0, f"{good}: valid, 1 engines\n")


def test_environment_mirrors_flags(scenario: Scenario) -> None:
    """A variable is a flag's default; one that makes no sense is as much misuse as the flag would be."""
    done = run("--demo", environment={"GPU_OOM_EXPORTER_WEB_LISTEN_ADDRESS": "nowhere"})
    assert "'nowhere' is not an address" in done.stderr
    done = run("--demo", environment={"GPU_OOM_EXPORTER_LOG_LEVEL": "loud"})
    assert (done.returncode, "GPU_OOM_EXPORTER_LOG_LEVEL: 'loud' is not one of" in done.stderr) == (2, True)


def test_version_and_help() -> None:
    """Both go to standard output and are no error."""
    assert run("--version").stdout.startswith("gpu-oom-exporter 0.")
    done = run("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout


def test_logs_as_json() -> None:
    """Every line is one object."""
    done = subprocess.Popen(
        [*COMMAND, "--demo", "--log.format=json", "--web.listen-address=127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    with done:
        assert done.stderr is not None
        lines = [json.loads(done.stderr.readline()) for _ in range(2)]
        done.terminate()
    assert [line["msg"] for line in lines] == ["starting", "listening"]
    assert lines[0]["sources"] == "engines,host,nvml"


@pytest.mark.parametrize(
    ("command", "status"),
    [("snapshot --demo > /dev/full", 1), ("--config.check >&-", 0), ("snapshot --demo | head -c 1", 0)],
)
def test_closed_and_full_output(command: str, status: int) -> None:
    """Standard output that is closed, full or cut off is no traceback."""
    shell = f"set -o pipefail; {' '.join(COMMAND)} {command}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=30)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_nonsense_requests_are_not_logged(start_daemon: StartDaemon) -> None:
    """Whoever can connect must not be able to fill the journal."""
    daemon = start_daemon("--demo")
    port = int(daemon.url.rpartition(":")[2])
    before = len(daemon.log())
    for request in (
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass
    assert daemon.get()[0] == 200
    assert len(daemon.log()) == before


def test_snapshot_on_the_demo() -> None:
    """One reading as JSON, masked: no model, no UUID, no user, no path; equal texts get equal masks."""
    done = run("snapshot", "--demo", "--output=json")
    assert done.returncode == 0, done.stderr
    for secret in ("Llama", "GPU-5ada", "ipykernel", "system.slice", "meta-llama"):
        assert secret not in done.stdout
    got = json.loads(done.stdout)
    assert got["nvml"]["gpus"][0]["memory"]["total_bytes"] == 81559 * MIB
    assert got["nvml"]["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert got["nvml"]["processes"]["4000"]["comm"] == "vllm"
    assert got["nvml"]["processes"]["4000"]["argv"][2] == "serve"
    assert got["nvml"]["gpus"][0]["uuid"] == got["host"]["gpus"][0]["uuid"]
    assert got["nvml"]["gpus"][0]["uuid"].startswith("masked-")


def test_snapshot_masks_containers(scenario: Scenario, tmp_path: Path) -> None:
    """Names and ids of containers and pods are nobody's business."""
    logs = tmp_path / "containers"
    logs.mkdir()
    identity = "ab" * 32
    (logs / f"secretpod_secretns_secretname-{identity}.log").touch()
    scenario.gpus().write()
    done = run("snapshot", "--output=json", f"--storage.path={tmp_path}", f"--path.container-logs={logs}")
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout
    assert identity not in done.stdout
    (only,) = json.loads(done.stdout)["containers"]["by_id"].values()
    assert only["pod"].startswith("masked-")


def test_a_snapshot_replays(scenario: Scenario, tmp_path: Path) -> None:
    """The printed snapshot is a Snapshot again, and analysis reaches the same figures from it."""
    from gpu_oom_exporter.analysis import State, think
    from gpu_oom_exporter.cli.snapshot import ADAPTER
    from gpu_oom_exporter.config import Config

    scenario.gpus(2).process(os.getpid()).write()
    done = run("snapshot", "--output=json", f"--storage.path={tmp_path}")
    assert done.returncode == 0, done.stderr
    report = think(ADAPTER.validate_json(done.stdout), State(), Config()).report
    assert report is not None
    assert [room.free_bytes for room in report.headroom.values()] == [70 * GIB - 600 * MIB] * 2


def test_snapshot_without_a_driver(tmp_path: Path) -> None:
    """What could not be read is said, and exit 1."""
    done = run("snapshot", f"--storage.path={tmp_path}", environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 1
    assert json.loads(done.stdout)["health"]["nvml"]["reason"] == "no_library"


def test_pids_on_the_page(start_daemon: StartDaemon) -> None:
    """PIDs are labels only when asked for."""
    assert 'pid="' not in start_daemon("--demo").get()[1]
    assert start_daemon("--demo", "--collect.process-pid").value(
        'gpu_oom_process_vram_bytes{UUID="GPU-5ada0000-0000-4000-8000-000000000002",comm="python3",gpu="2",pid="9120"'
    )


def test_demo_speed(start_daemon: StartDaemon) -> None:
    """Sixty times the speed: a minute of the simulated host passes in a second."""
    daemon = start_daemon("--demo", "--demo.speed=60")
    stamp = 'gpu_oom_source_last_success_timestamp_seconds{source="nvml"}'
    first, began = daemon.value(stamp), time.monotonic()
    assert first is not None
    wait_until(lambda: (daemon.value(stamp) or 0) > first + 60)
    assert time.monotonic() - began < 10


def test_no_storage(start_daemon: StartDaemon, scenario: Scenario) -> None:
    """A storage folder that cannot be written costs a warning and nothing else."""
    scenario.gpus().write()
    daemon = start_daemon("--storage.path=/proc/nowhere")
    assert daemon.value(up(0)) == 1.0
    assert "reader not remembered" in daemon.log()
