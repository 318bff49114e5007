"""A host with four GPUs: two vLLM engines, a display with a notebook, a leak, an orphan, and bursts of requests.

Everything is a function of the time since start, so two runs are alike and any moment can be looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_oom_exporter import config
from gpu_oom_exporter.model import Answer, HostFacts, PciGpu
from gpu_oom_exporter.simulate.vllm import VllmPage
from gpu_oom_exporter.sources.board import Clock, Source
from gpu_oom_exporter.sources.engines import EngineSource, FetchError
from gpu_oom_exporter.sources.host import own_process
from gpu_oom_exporter.sources.nvml import NvmlSource
from gpu_oom_exporter.sources.procfs import HOST_PID_NAMESPACE
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

MIB = 1024 * 1024
GIB = 1024 * MIB

TOTAL = 81559 * MIB
"""What CUDA reports of an 80 GB H100, as `nvidia-smi` prints it."""

RESERVED = 593 * MIB
CONTEXT = 520 * MIB
"""A CUDA context with the libraries that vLLM loads."""

UTILIZATION = 0.9
POOL_BLOCKS = 26000
BLOCK_TOKENS = 16

LEAK_PER_SECOND = MIB
LOAD_SECONDS = 75.0
LEAK_ENDS = 300 * MIB
"""The leaking engine dies when this little is free, and loads again."""

BURST_EVERY = 420.0
BURST_SECONDS = 150.0

BOOT_SECONDS = 86400.0
TICKS = 100


class FastClock:
    """*real* sped up by *speed*; sleeping is sped up as well."""

    def __init__(self, real: Clock, speed: float) -> None:
        self.real = real
        self.speed = speed
        self._time, self._mono = real.time(), real.mono()

    def time(self) -> float:
        """Unix seconds of the simulated host."""
        return self._time + (self.mono() - self._mono)

    def mono(self) -> float:
        """Monotonic seconds of the simulated host."""
        return self._mono + (self.real.mono() - self._mono) * self.speed

    async def sleep(self, seconds: float) -> None:
        """Let *seconds* of the simulated host pass."""
        await self.real.sleep(seconds / self.speed)


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the leaking engine: when it began, and how long it has been serving (negative: loading)."""

    number: int
    began: float
    serving: float


@dataclass(frozen=True, slots=True)
class SimEngine:
    """An engine of the simulated host."""

    name: str
    port: int
    model: str
    gpu: int
    server: int
    core: int
    leaks: bool = False
    bursts: bool = False


CHAT = SimEngine("chat", 8000, "meta-llama/Llama-3.1-8B-Instruct", 0, 4000, 4057, bursts=True)
CODE = SimEngine("code", 8001, "Qwen/Qwen2.5-Coder-14B-Instruct", 1, 4200, 4261, leaks=True)
ENGINES = (CHAT, CODE)
XORG, SHELL, NOTEBOOK, ORPHAN = 1811, 2043, 9120, 3377


class Host:
    """What is true on the simulated host at a moment; `started` is its monotonic start."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.started = clock.mono()
        self.epoch = clock.time()

    def now(self) -> float:
        """Seconds since the start."""
        return self.clock.mono() - self.started

    def life(self, engine: SimEngine) -> Life:
        """The life *engine* is in. One that leaks dies and loads again; the first one was up before the start."""
        now = self.now()
        if not engine.leaks:
            return Life(0, -3600.0, now + 3600.0)
        serving = (TOTAL - RESERVED - self.pool() - LEAK_ENDS) / LEAK_PER_SECOND
        first = serving / 3  # the demo starts when two thirds of the leak have happened
        if now < first:
            return Life(0, first - serving - LOAD_SECONDS, now + serving - first)
        number, within = divmod(now - first, LOAD_SECONDS + serving)
        return Life(int(number) + 1, now - within, within - LOAD_SECONDS)

    def pool(self) -> int:
        """What an engine takes at start-up."""
        return math.ceil(TOTAL * UTILIZATION)

    def engine_bytes(self, engine: SimEngine) -> int:
        """Device memory of *engine*'s process."""
        life = self.life(engine)
        if life.serving < 0:
            return CONTEXT + int((self.pool() - CONTEXT) * 0.6 * (1 + life.serving / LOAD_SECONDS))
        leaked = int(life.serving * LEAK_PER_SECOND) if engine.leaks else 0
        # activations outside the pool come and go with the load
        return self.pool() + leaked + (int(200 * MIB * self.burst(engine)) if engine.bursts else 0)

    def burst(self, engine: SimEngine) -> float:
        """How far *engine* is in a burst of requests, 0..1."""
        if not engine.bursts:
            return 0.0
        within = self.now() % BURST_EVERY
        return math.sin(math.pi * within / BURST_SECONDS) if within < BURST_SECONDS else 0.0

    def gpus(self) -> list[dict[str, Any]]:
        """Every GPU in the NVML reader's words."""
        processes: list[list[list[Any]]] = [[], [], [], []]
        for engine in ENGINES:
            busy = 35 + int(60 * self.burst(engine))
            processes[engine.gpu].append([engine.core, "compute", self.engine_bytes(engine), busy])
        processes[2] = [
            [XORG, "graphics", 186 * MIB, 1],
            [SHELL, "graphics", 231 * MIB, 0],
            [NOTEBOOK, "compute", 9 * GIB + 412 * MIB, 0],
        ]
        processes[3] = [[ORPHAN, "compute", self.pool(), 0]]
        found = []
        for index, own in enumerate(processes):
            used = sum(p[2] for p in own) + 12 * MIB
            found.append(
                {
                    "index": index,
                    "uuid": f"GPU-5ada0000-0000-4000-8000-00000000000{index}",
                    "bus": f"00000000:{0x1A + 16 * index:02X}:00.0",
                    "name": "NVIDIA H100 80GB HBM3",
                    "minor": index,
                    "up": True,
                    "memory": [TOTAL, used, TOTAL - RESERVED - used, RESERVED],
                    "kind": "dedicated",
                    "gaps": [],
                    "mig": False,
                    "recovery": "none",
                    "gpu_percent": max(p[3] for p in own),
                    "processes": own,
                }
            )
        return found

    def page(self, engine: SimEngine, page: VllmPage) -> bytes:
        """The metrics page of *engine*."""
        burst = self.burst(engine)
        ratio = min(1.0, 0.18 + 0.06 * math.sin(self.now() / 37) + 1.1 * burst)
        running = 4 + int(60 * min(1.0, ratio))
        waiting = int(40 * max(0.0, burst - 0.75)) if ratio >= 1.0 else 0
        bursts_over = math.floor(self.now() / BURST_EVERY)
        preempted = 14 * bursts_over + int(14 * min(1.0, (self.now() % BURST_EVERY) / BURST_SECONDS))
        plain = f'{{engine="0",model_name="{page.captured_model}"}}'
        reason = f'{{engine="0",model_name="{page.captured_model}",reason="%s"}}'
        life = self.life(engine)
        started = self.epoch + life.began
        values = {
            "process_start_time_seconds": started,
            f"vllm:kv_cache_usage_perc{plain}": ratio,
            f"vllm:num_requests_running{plain}": float(running),
            f"vllm:num_requests_waiting{plain}": float(waiting),
            f"vllm:num_requests_waiting_by_reason{reason % 'capacity'}": float(waiting),
            f"vllm:num_preemptions_total{plain}": float(preempted if engine.bursts else 0),
            f"vllm:num_preemptions_created{plain}": started,
        }
        info = {
            "block_size": str(BLOCK_TOKENS),
            "gpu_memory_utilization": str(UTILIZATION),
            "kv_cache_memory_bytes": "None",
            "kv_cache_size_tokens": str(POOL_BLOCKS * BLOCK_TOKENS),
            "num_gpu_blocks": str(POOL_BLOCKS),
        }
        return page.render(engine.model, values, info)


class SimLink:
    """The NVML reader of the simulated host."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def ask(self) -> Mapping[str, Any]:
        """One reading, as JSON and back: what crosses the real pipe."""
        reply = {"driver": "580.95.05", "gpus": self.host.gpus(), "xids": [], "rejected": {}}
        return dict(json.loads(json.dumps(reply)))

    def gone(self) -> bool:
        """It ends at once."""
        return True

    def stop(self, force: bool) -> None:
        """Nothing is held."""


class SimProc(ProcReader):
    """The /proc of the simulated host: files that are made when they are read."""

    def __init__(self, host: Host) -> None:
        super().__init__("/simulated/proc", cgroupfs="/simulated/cgroup")
        self.host = host

    def _processes(self) -> dict[int, tuple[str, str, int, float, tuple[str, ...], int]]:
        """PID → comm, state, parent, start in seconds since boot, argv, port it listens on or 0."""
        found: dict[int, tuple[str, str, int, float, tuple[str, ...], int]] = {}
        for engine in ENGINES:
            life = self.host.life(engine)
            start = BOOT_SECONDS + life.began
            argv = (
                "/usr/bin/python3",
                "/usr/local/bin/vllm",
                "serve",
                engine.model,
                "--port",
                str(engine.port),
                "--gpu-memory-utilization",
                str(UTILIZATION),
            )
            found[engine.server] = ("vllm", "S", 1, start, argv, engine.port if life.serving >= 0 else 0)
            found[engine.core] = ("VLLM::EngineCor", "S", engine.server, start + 9, ("VLLM::EngineCore",), 0)
        found[XORG] = ("Xorg", "S", 1, 12.0, ("/usr/lib/xorg/Xorg", ":0"), 0)
        found[SHELL] = ("gnome-shell", "S", 1, 19.0, ("/usr/bin/gnome-shell",), 0)
        found[NOTEBOOK] = ("python3", "S", 1, 70000.0, ("/usr/bin/python3", "-m", "ipykernel_launcher"), 0)
        found[ORPHAN] = ("VLLM::EngineCor", "S", 1, 61000.0, ("VLLM::EngineCore",), 0)
        return found

    def _list(self, path: str) -> list[str]:
        if not path:
            return [str(pid) for pid in self._processes()]
        return ["3"]

    def _link(self, path: str) -> str:
        if path.endswith("ns/pid"):
            return HOST_PID_NAMESPACE
        if path.endswith("ns/net"):
            return "net:[4026531840]"
        return f"socket:[{path.partition('/')[0]}]"

    def _bytes(self, path: str) -> bytes | None:
        if path == "uptime":
            return f"{BOOT_SECONDS + self.host.now():.2f} 0.00\n".encode()
        pid, _, name = path.partition("/")
        process = self._processes().get(int(pid)) if pid.isdecimal() else None
        if process is None:
            return None
        comm, state, parent, start, argv, _ = process
        match name:
            case "stat":
                head = f"{pid} ({comm}) {state} {parent} {pid} {pid}"
                return f"{head}{' 0' * 15} {int(start * TICKS)}{' 0' * 30}\n".encode()
            case "status":
                return b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\n"
            case "cmdline":
                return "\0".join(argv).encode() + b"\0"
            case "cgroup":
                engine = next((e for e in ENGINES if int(pid) in (e.server, e.core)), None)
                unit = (
                    f"/system.slice/vllm-{engine.name}.service"
                    if engine
                    else "/user.slice/user-1000.slice/session-2.scope"
                )
                return f"0::{unit}\n".encode()
            case "net/tcp":
                peer = "00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0"
                ports = {owner: p[5] for owner, p in self._processes().items() if p[5]}
                rows = [f"   0: 0100007F:{port:04X} {peer} {owner} 1\n" for owner, port in ports.items()]
                return f"sl\n{''.join(rows)}".encode()
        return None


class SimFetch:
    """HTTP to the simulated engines."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.page_of = VllmPage()

    async def __call__(self, url: str, limit: int, token: str | None, timeout: float) -> bytes:
        """The body of *url*; nobody listens while an engine loads."""
        engine = next(e for e in ENGINES if f":{e.port}/" in url)
        if self.host.life(engine).serving < 0:
            raise FetchError(Answer.REFUSED, "nobody listens", True)
        path = url.partition(f":{engine.port}")[2]
        if path == "/version":
            return b'{"version":"0.32.0"}'
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": engine.model, "max_model_len": 32768}]}).encode()
        return self.host.page(engine, self.page_of)

    async def close(self) -> None:
        """Nothing is held."""


class SimHostSource:
    """RAM and PCI functions of the simulated host; the daemon's own cost is the real one."""

    name = "host"
    key = ""
    timeout_seconds = 2.0
    stale_seconds = 20.0
    period_seconds = 5.0

    def __init__(self, host: Host) -> None:
        self.host = host

    async def read(self) -> HostFacts:
        """One reading."""
        available = 412 * GIB - int(8 * GIB * math.sin(self.host.now() / 300))
        gpus = tuple(PciGpu(gpu["bus"], False, gpu["uuid"], gpu["name"]) for gpu in self.host.gpus())
        return HostFacts(512 * GIB, available, 0, gpus, own_process())

    async def close(self) -> None:
        """Nothing is held."""


def demo_config() -> config.Config:
    """The configuration that declares the simulated engines."""
    return config.Config(
        engines=tuple(config.Engine(name=e.name, url=f"http://127.0.0.1:{e.port}") for e in ENGINES),
    )


def demo_sources(clock: Clock) -> tuple[tuple[Source, ...], SimFetch]:
    """The readers of a simulated host whose life begins now."""
    host = Host(clock)
    proc = SimProc(host)
    fetch = SimFetch(host)
    nvml = NvmlSource(clock, proc, "/simulated/storage", start=lambda: SimLink(host))
    engines = (EngineSource(engine, fetch, clock, proc) for engine in demo_config().engines)
    return (nvml, SimHostSource(host), *engines), fetch
