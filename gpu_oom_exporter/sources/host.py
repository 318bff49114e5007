"""RAM, swap, and the GPUs that the kernel sees on the PCI bus."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import psutil

from gpu_oom_exporter.model import HostFacts, OwnProcess, PciGpu, Reason
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.pci import driver_facts, long_bus_id, nvidia_functions, sleeps

FIELDS = {"MemTotal": "total", "MemAvailable": "available", "SwapFree": "swap"}


def own_process() -> OwnProcess:
    """What this process has cost so far."""
    process = psutil.Process()
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        return OwnProcess(
            times.user + times.system,
            memory.rss,
            memory.vms,
            process.create_time(),
            process.num_fds(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


class HostSource:
    """Reads *procfs*/meminfo and the PCI devices under *sysfs*."""

    name = "host"
    key = ""
    timeout_seconds = 2.0
    stale_seconds = 20.0
    period_seconds = 5.0

    def __init__(self, procfs: str = "/proc", sysfs: str = "/sys", dev: str = "/dev") -> None:
        self.procfs = procfs
        self.dev = dev
        self.sysfs = sysfs

    async def read(self) -> HostFacts:
        """One reading; fails when meminfo cannot be read."""
        found: dict[str, int] = {}
        try:
            with open(f"{self.procfs}/meminfo", encoding="utf-8", errors="replace") as file:  # noqa: ASYNC230
                for line in file:
                    name, _, rest = line.partition(":")
                    if name in FIELDS:
                        found[FIELDS[name]] = int(rest.split()[0]) * 1024
        except (OSError, IndexError, ValueError) as err:
            raise SourceError(Reason.READER_FAILED, f"{self.procfs}/meminfo: {err}") from err
        return HostFacts(
            found.get("total"),
            found.get("available"),
            found.get("swap"),
            tuple(self._gpus()),
            own_process(),
            *self._shm(),
        )

    def _shm(self) -> tuple[int | None, int | None]:
        """Size and free bytes of the host's /dev/shm, which is PID 1's: ours is another one in a container."""
        try:
            status = os.statvfs(f"{self.procfs}/1/root/dev/shm")
        except OSError:
            return None, None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def _gpus(self) -> Iterator[PciGpu]:
        for address in nvidia_functions(self.sysfs, self.procfs, self.dev):
            known = driver_facts(self.procfs, address)
            asleep = sleeps(self.sysfs, address)
            yield PciGpu(long_bus_id(address), asleep, known.get("GPU UUID", ""), known.get("Model", ""))

    async def close(self) -> None:
        """Nothing is held."""
