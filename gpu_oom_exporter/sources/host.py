"""RAM, swap, and the GPUs that the kernel sees on the PCI bus."""

from __future__ import annotations

import resource

import psutil

from gpu_oom_exporter.model import HostFacts, OwnProcess, PciGpu, Reason
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.pci import long_bus_id, nvidia_functions, sleeps

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

    def __init__(self, procfs: str = "/proc", sysfs: str = "/sys") -> None:
        self.procfs = procfs
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
            tuple(
                PciGpu(long_bus_id(address), sleeps(self.sysfs, address), *self._known_to_driver(address))
                for address in nvidia_functions(self.sysfs)
            ),
            own_process(),
        )

    def _known_to_driver(self, address: str) -> tuple[str, str]:
        """(UUID, model) from the driver's own /proc file; it needs no NVML and survives a lost GPU."""
        found = {"GPU UUID": "", "Model": ""}
        try:
            with open(f"{self.procfs}/driver/nvidia/gpus/{address}/information", errors="replace") as file:
                for line in file:
                    name, _, value = line.partition(":")
                    if name.strip() in found and "?" not in value:
                        found[name.strip()] = value.strip()
        except OSError:
            pass
        return found["GPU UUID"], found["Model"]

    async def close(self) -> None:
        """Nothing is held."""
