"""`make bench`: what the daemon costs, against a floor and a peer measured in the same run.

8 GPUs × 8 processes (real ones, sleeping) over the C stand-in. CPU time is the kernel's own count per thread.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpu_oom_exporter.analysis.incidents import Classifier
from gpu_oom_exporter.analysis.incidents.scanning import ANCHORS
from gpu_oom_exporter.catalog.engines import VLLM
from gpu_oom_exporter.catalog.metrics import families
from gpu_oom_exporter.publish.exposition import Spelled, write
from gpu_oom_exporter.sources.engines import read_page
from gpu_oom_exporter.sources.openers import Openers
from tests.catalog.test_metrics import full_report
from tests.conftest import COMMAND, GIB, HERE, Scenario, compile_stand_in, host_proc
from tests.publish.test_exposition import reference

GPUS, EACH = 8, 8
PEER = "nvitop-exporter==1.7.2"

FLOOR = """
import json, os, sys, time
import pynvml as nv
nv.nvmlInit()
handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]
events = nv.nvmlEventSetCreate()
pids = set()
def once():
    for h in handles:
        nv.nvmlDeviceGetMemoryInfo(h, nv.nvmlMemory_v2)
        nv.nvmlDeviceGetUtilizationRates(h)
        for call in (nv.nvmlDeviceGetComputeRunningProcesses, nv.nvmlDeviceGetGraphicsRunningProcesses,
                     nv.nvmlDeviceGetMPSComputeRunningProcesses):
            pids.update(p.pid for p in call(h))
        try: nv.nvmlDeviceGetProcessUtilization(h, 0)
        except nv.NVMLError: pass
    try: nv.nvmlEventSetWait(events, 0)
    except nv.NVMLError: pass
    for pid in pids:
        for name in ("stat", "status", "cmdline", "cgroup"):
            with open(f"/proc/{pid}/{name}", "rb") as file: file.read()
once()
began = time.process_time()
for _ in range(100): once()
print((time.process_time() - began) / 100)
"""
RESTED_FLOOR = FLOOR.replace("range(100): once()", "range(12): time.sleep(1), once()").replace("/ 100", "/ 12")


def cpu_seconds(*pids: int) -> float:
    """CPU time of all threads of *pids*, from the scheduler's count in nanoseconds."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return total / 1e9


def measure_floor(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def tree(pid: int) -> list[int]:
    """*pid* and its children."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def get(url: str, timeout: float = 30.0) -> bytes:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=timeout) as got:
        body = got.read()
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()  # it takes its reader along, also one that hangs
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(claim: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if claim():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise SystemExit("bench: a server did not come up")
        time.sleep(0.1)


def measure_idle(pids: list[int], seconds: float) -> float:
    before = cpu_seconds(*pids)
    time.sleep(seconds)
    return (cpu_seconds(*pids) - before) / seconds


def measure_scrapes(pids: list[int], url: str, idle: float, count: int, pause: float) -> tuple[float, list[float]]:
    """(CPU seconds a scrape costs on top of idling, latencies). *pause* lets a new page be due each time."""
    before, began, latencies = cpu_seconds(*pids), time.monotonic(), []
    for _ in range(count):
        at = time.monotonic()
        get(url)
        latencies.append(time.monotonic() - at)
        time.sleep(pause)
    spent = cpu_seconds(*pids) - before - idle * (time.monotonic() - began)
    return max(0.0, spent) / count, latencies


def best_of(call: Callable[[], object], rounds: int = 30) -> float:
    found = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return statistics.median(found)


def row(what: str, value: str, target: str = "") -> None:
    print(f"{what:<58} {value:>16} {target:>16}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each idle measurement takes")
    parser.add_argument("--no-peer", action="store_true", help="leave nvitop-exporter out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(GPUS * EACH)]
        try:
            bench(folder, [s.pid for s in sleepers], arguments.seconds, not arguments.no_peer)
        finally:
            for sleeper in sleepers:
                sleeper.kill()


def bench(folder: Path, pids: list[int], seconds: float, peer: bool) -> None:
    os.environ["LD_LIBRARY_PATH"] = str(compile_stand_in(folder / "library"))
    os.environ["GPU_OOM_NVML_SCENARIO"] = str(folder / "scenario")
    scenario = Scenario(folder / "scenario", folder / "device").gpus(GPUS, used=70 * GIB)
    for at, pid in enumerate(pids):
        scenario.process(pid, 8 * GIB, gpu=at % GPUS, sm=10)
    scenario.write()

    row(f"{GPUS} GPUs x {EACH} processes", "measured", "target")
    floor = min(measure_floor(FLOOR) for _ in range(5))  # the fastest of five: the harder target
    rested = measure_floor(RESTED_FLOOR)
    row("floor: the same NVML calls and /proc reads, plain loop", f"{floor * 1000:.2f} ms")
    row("  the same once a second, with the caches cold as ours are", f"{rested * 1000:.2f} ms")

    port = 19140
    url = f"http://127.0.0.1:{port}/metrics"
    proc = f"--path.procfs={host_proc(folder / 'proc', *pids)}"
    command = [*COMMAND, "serve", f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={folder}/storage", proc]
    with running(command, folder / "daemon.log") as process:
        until(lambda: get(url))
        time.sleep(3.0)
        members = tree(process.pid)
        idle = measure_idle(members, seconds)
        row("CPU per tick (daemon and reader)", f"{idle * 1000:.2f} ms", f"<= {2 * floor * 1000:.2f} ms")
        row("  ratio to the floor", f"{idle / floor:.2f} x", "<= 2 x")
        row("  ratio to the floor once a second", f"{idle / rested:.2f} x")
        row("CPU idle, no scraper", f"{idle * 100:.2f} %")
        scrape, latencies = measure_scrapes(members, url, idle, 20, 1.1)
        row("CPU per scrape of a new page", f"{scrape * 1000:.2f} ms")
        row("CPU with two scrapers at 15 s", f"{(idle + 2 * scrape / 15) * 100:.2f} %", "<= 1 %")
        row("CPU per hour with two scrapers at 15 s", f"{(idle + 2 * scrape / 15) * 3600:.1f} s", "<= 36 s")
        rss = [rss_mib(pid) for pid in members]
        row("RSS daemon + reader", f"{rss[0]:.0f} + {sum(rss[1:]):.0f} MiB", "<= 80 MiB")
        page = get(url)
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        row("page", f"{len(page) / 1024:.0f} KiB, {series} series")
        row("series per GPU / per host", per_gpu(page), "<= 60 / <= 150")
        row("scrape latency p50 / p99", f"{quantiles(latencies)} ms")

    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        running(hung_command(folder, port, mute), folder / "log") as process,
    ):
        until(lambda: get(url))
        scenario.add("delay nvmlDeviceGetMemoryInfo_v2 * 3600000").write()
        time.sleep(6.0)  # until the driver and the engine are both in the middle of an answer
        hung: list[float] = []
        clients = [threading.Thread(target=hammer, args=(url, 100, hung)) for _ in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        row("scrape latency p50 / p99 while every source hangs", f"{quantiles(hung)} ms", "p99 <= 30 ms")

    report = full_report(8)
    found = list(families(report))
    count = sum(len(family.samples) for family in found)
    spelled: Spelled = {}
    ours, theirs = best_of(lambda: write(families(report), spelled=spelled)), best_of(lambda: reference(found, False))
    row("page writer, per 1,000 series", f"{ours / count * 1e6:.2f} ms", "<= 2 ms")
    row("  prometheus_client, same samples", f"{theirs / count * 1e6:.2f} ms")
    capture = (HERE / "captures" / "vllm" / "0.32-preempt.prom").read_bytes()
    text = capture.decode()
    row(
        f"reading a vLLM page of {len(capture) // 1024} KiB",
        f"{best_of(lambda: read_page(capture, VLLM)) * 1000:.2f} ms",
        "<= 2 ms",
    )
    row("  the full parser", f"{best_of(lambda: list(text_string_to_metric_families(text)), 5) * 1000:.2f} ms")
    generate_latest(CollectorRegistry())
    bench_openers(folder)
    bench_logs(folder)
    bench_storm(folder)
    if peer:
        bench_peer(folder, scenario, seconds)


ORDINARY_BYTES, HOSTILE_BYTES = 200_000_000, 20_000_000

STATS = (
    "(APIServer pid=32164) INFO 12-01 {time} [loggers.py:335] Engine 000: Avg prompt throughput: {n}.7 tokens/s, Avg generation "
    "throughput: 559.7 tokens/s, Running: 2 reqs, Waiting: {w} reqs, GPU KV cache usage: 89.5%, Prefix cache hit rate: 3.2%\n"
)
ACCESS = '(APIServer pid=32164) INFO:     10.0.0.{w}:{n} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
NEAR = (
    "INFO 07-15 {time} [logger.py:43] Received request chatcmpl-{n}: prompt: 'CUDA out of memory. Tried to allocate {w}.00 GiB. GPU 0 "
    "has a total capacity of 24.00 GiB of which 3 GiB is free.', params: SamplingParams(n=1, max_tokens=512), lora_request: None.\n",
    "(EngineCore_DP0 pid={n}) ERROR 10-25 {time} [core.py:708] Capture cuda graph failed: invalid argument {w}\n",
    "(EngineCore_DP0 pid={n}) ERROR 10-25 {time} [core.py:708]     raise EngineDeadError(died unexpectedly {w})\n",
    "[{n}.{w}] NVRM: Xid (PCI:0000:17:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)\n",
)


def generated(path: Path, size: int, shapes: Sequence[str]) -> Path:
    """A log of *size* bytes of *shapes* in turn, with times and numbers that change."""
    with path.open("w") as file:
        written = n = 0
        while written < size:
            lines = [
                shapes[(n + k) % len(shapes)].format(
                    time=f"{(n + k) // 3600 % 24:02d}:{(n + k) // 60 % 60:02d}:{(n + k) % 60:02d}",
                    n=n + k,
                    w=(n + k) % 200,
                )
                for k in range(1000)
            ]
            written += sum(map(len, lines))
            n += 1000
            file.writelines(lines)
    return path


def bench_logs(folder: Path) -> None:
    """Log lines to incidents, in chunks of 256 KiB on one core, beside grep with the same literals."""
    pattern = "|".join(re.sub(r"([][(){}.*+?^$|\\])", r"\\\1", anchor.decode()) for anchor in ANCHORS)
    logs = (
        (
            "ordinary vLLM log",
            generated(folder / "ordinary.log", ORDINARY_BYTES, (STATS, *(ACCESS,) * 9)),
            ">= 100 MB/s",
        ),
        ("hostile log, all near misses", generated(folder / "hostile.log", HOSTILE_BYTES, NEAR), ""),
    )
    for name, path, target in logs:
        megabytes = path.stat().st_size / 1e6
        classifier = Classifier()
        before, began, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 18):
                found += len(classifier.feed(chunk))
        found += len(classifier.close())
        ours = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            ["grep", "-cE", pattern, str(path)], env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, capture_output=True
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        theirs = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
        row(f"{name}, {megabytes:.0f} MB, {found} incidents", f"{megabytes / ours:.0f} MB/s, +{grown:.0f} MiB", target)
        row("  grep -cE, the same literals", f"{megabytes / theirs:.0f} MB/s")
        path.unlink()


STORM_MB_PER_SECOND, STORM_SECONDS = 50, 20


def bench_storm(folder: Path) -> None:
    """How late the tick is while a watched log grows by 50 MB/s, beside the same daemon while it does not grow."""
    port = 19141
    url = f"http://127.0.0.1:{port}/metrics"
    path, config = folder / "storm.log", folder / "storm.yaml"
    path.touch()
    config.write_text(f"logs: {{files: [{{path: {path}}}], containers: false, kernel: false, journal: false}}")
    command = [*COMMAND, "serve", f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={folder}/storage-of-storm"]
    with running([*command, f"--config.file={config}"], folder / "storm-daemon.log") as process:
        until(lambda: "gpu_oom_log_files 1" in get(url).decode())
        calm = lateness_ms(url, STORM_SECONDS)
        storm = threading.Thread(target=rage, args=(path,))
        before, began = cpu_seconds(process.pid), time.monotonic()
        storm.start()
        late = lateness_ms(url, STORM_SECONDS)
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - began)
        storm.join()
        row("tick lateness p50 / most, quiet log", f"{calm} ms")
        row(f"  while it grows by {STORM_MB_PER_SECOND} MB/s", f"{late} ms")
        row("  CPU, and lines dropped", f"{share * 100:.0f} %, {value_of(url, 'gpu_oom_log_lines_dropped_total'):.0f}")


def rage(path: Path) -> None:
    """Write ordinary lines of a server, so many MB each second."""
    lines = "".join((STATS if n % 10 == 0 else ACCESS).format(time="10:00:01", n=n, w=n % 100) for n in range(9000))
    portion = (lines.encode() * 10)[: STORM_MB_PER_SECOND * 50_000]
    with path.open("ab") as file:
        began = time.monotonic()
        for n in range(STORM_SECONDS * 20):
            file.write(portion[: portion.rindex(b"\n") + 1])
            time.sleep(max(0.0, began + (n + 1) / 20 - time.monotonic()))


def lateness_ms(url: str, seconds: int) -> str:
    """Median and largest of what the daemon says its ticks were late by, asked twice a second."""
    found = []
    for _ in range(2 * seconds):
        found.append(value_of(url, "gpu_oom_tick_lateness_seconds") * 1000)
        time.sleep(0.5)
    return f"{statistics.median(found):.1f} / {max(found):.1f}"


def value_of(url: str, name: str) -> float:
    """The sum of the samples *name* of the page at *url*."""
    lines = get(url).decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


CROWD, DESCRIPTORS = 2000, 50


def bench_openers(folder: Path) -> None:
    """Who has the device file open, among 2,000 processes with 50 descriptors each."""
    device, plain = folder / "nvidia0", folder / "plain"
    device.touch()
    plain.touch()
    code = (
        f"open(my $d, '<', '{device}'); my @f; for (1..{DESCRIPTORS - 4}) {{ open($f[$_], '<', '{plain}') }} "
        f'for (1..{CROWD}) {{ if (!fork()) {{ close($d) if $_ > 10; sleep 600; exit }} }} print "ok\\n"; '
        '$| = 1; print "\\n"; sleep 600'
    )
    with subprocess.Popen(["perl", "-e", code], stdout=subprocess.PIPE, start_new_session=True) as crowd:
        assert crowd.stdout is not None
        crowd.stdout.readline()
        try:
            openers = Openers("/proc", (str(device),))
            first = best_of(lambda: openers.scan(0.0), 1)
            found = openers.scan(1.0)
            again = best_of(lambda: openers.scan(2.0), 5)
            row(f"device files, {CROWD} processes x {DESCRIPTORS}: first scan", f"{first * 1000:.0f} ms")
            row(f"  repeated scan ({len(found)} have it open)", f"{again * 1000:.0f} ms")
            for tool, command in (("fuser", ["fuser", str(device)]), ("lsof", ["lsof", str(device)])):
                if shutil.which(tool) is None:
                    row(f"  {tool}", "not installed")
                    continue
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, capture_output=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                target = ">= 10 x ours" if tool == "fuser" else ""
                row(f"  {tool}", f"{spent * 1000:.0f} ms, {spent / again:.1f} x", target)
        finally:
            os.killpg(crowd.pid, signal.SIGKILL)


def hung_command(folder: Path, port: int, mute: socket.socket) -> list[str]:
    """A daemon whose engine is *mute*: it takes the connection and never says a word."""
    config = folder / "hung.yaml"
    config.write_text(f"engines: [{{name: mute, url: 'http://127.0.0.1:{mute.getsockname()[1]}'}}]")
    listen, storage = f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={folder}/hung"
    return [*COMMAND, "serve", f"--config.file={config}", listen, storage]


def per_gpu(page: bytes) -> str:
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    on_gpu = sum('gpu="' in line for line in lines)
    return f"{on_gpu / GPUS:.0f} / {len(lines) - on_gpu}"


def quantiles(latencies: list[float]) -> str:
    ordered = sorted(latencies)
    return f"{statistics.median(ordered) * 1000:.1f} / {ordered[int(len(ordered) * 0.99) - 1] * 1000:.1f}"


def hammer(url: str, count: int, latencies: list[float]) -> None:
    for _ in range(count):
        began = time.monotonic()
        get(url)
        latencies.append(time.monotonic() - began)
        time.sleep(0.02)


def bench_peer(folder: Path, scenario: Scenario, seconds: float) -> None:
    """nvitop-exporter on the same stand-in, from PyPI into a virtual environment of its own."""
    scenario.without("delay").write()
    environment = folder / "peer"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", PEER]
    if subprocess.run(pip, capture_output=True).returncode != 0:
        row(PEER, "not installable")
        return
    port = 19141
    url = f"http://127.0.0.1:{port}/metrics"
    command = [str(environment / "bin" / "nvitop-exporter"), "--bind-address", "127.0.0.1", "--port", str(port)]
    with running([*command, "--interval", "1.0"], folder / "peer.log") as process:
        until(lambda: get(url))
        time.sleep(3.0)
        members = tree(process.pid)
        idle = measure_idle(members, seconds)
        scrape, latencies = measure_scrapes(members, url, idle, 100, 0.1)
        row(f"{PEER}, 1 s: CPU idle", f"{idle * 100:.2f} %")
        row("  CPU per scrape", f"{scrape * 1000:.2f} ms")
        row("  CPU with two scrapers at 15 s", f"{(idle + 2 * scrape / 15) * 100:.2f} %")
        row("  RSS", f"{sum(rss_mib(pid) for pid in members):.0f} MiB")
        row("  page", f"{len(get(url)) / 1024:.0f} KiB")
        row("  scrape latency p50 / p99", f"{quantiles(latencies)} ms")


if __name__ == "__main__":
    main()
