"""The child process that alone speaks to the NVIDIA driver: one request line in, one JSON line out.

Standard library and pynvml only, because its memory counts twice on every host. It ends when its standard
input ends, so it never outlives the daemon unless the driver holds it in the kernel.
Every oddity of NVML is dealt with here: missing symbols, unsupported calls, lost GPUs, sentinels, races.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pynvml as nv

from gpu_oom_exporter.sources.pci import nvidia_functions, short_bus_id, sleeps

NO_VALUE_64 = 2**64 - 1
NO_VALUE_32 = 2**32 - 1

LAYOUT_EVERY = 30
"""Readings between two looks at the bus, the MIG layout and the recovery action, which change by a human hand."""

SIZE_RACES = 3
"""How often a process list is asked again when it grew between NVML's two calls."""

RECOVERY_ACTIONS = {
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
"""NVML_GPU_RECOVERY_ACTION_*, as pynvml 13 numbers them."""

RECOVERY_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; a number, because older pynvml has no name for it."""

CODES = {
    nv.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    nv.NVML_ERROR_NO_PERMISSION: "no_permission",
    nv.NVML_ERROR_NOT_FOUND: "not_found",
    nv.NVML_ERROR_INSUFFICIENT_SIZE: "size_race",
    nv.NVML_ERROR_FUNCTION_NOT_FOUND: "no_symbol",
    nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "no_symbol",
    nv.NVML_ERROR_GPU_IS_LOST: "lost",
    nv.NVML_ERROR_RESET_REQUIRED: "lost",
    nv.NVML_ERROR_GPU_NOT_FOUND: "lost",
    nv.NVML_ERROR_UNINITIALIZED: "gone",
    nv.NVML_ERROR_DRIVER_NOT_LOADED: "gone",
    nv.NVML_ERROR_LIBRARY_NOT_FOUND: "no_library",
    nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
    nv.NVML_ERROR_TIMEOUT: "timeout",
}

INIT_REASONS = {
    "no_library": ("no_library", "libnvidia-ml.so.1 was not found or is no library; install the driver"),
    "gone": ("no_driver", "the NVIDIA kernel driver is not loaded"),
    "mismatch": ("mismatch", "driver and libnvidia-ml have different versions; reload the driver or reboot"),
    "no_permission": ("no_permission", "no access to the NVIDIA device files"),
    "lost": ("no_driver", "no GPU answers the driver"),
}


class InitFailed(Exception):
    """NVML would not start: a `reason` from the closed set, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class DriverGone(Exception):
    """NVML was there and is not any more; this process must be replaced."""


class Driver:
    """NVML, initialised once per life of this process."""

    def __init__(self, functions: list[str], sleeping: set[str]) -> None:
        self.rejected: dict[str, int] = {}
        self.version = ""
        self.devices: list[Device] = []
        self.events: Any = None
        _, code = self.ask(nv.nvmlInit)
        if code == "lost":
            return  # the only GPU is lost: that is a reading, of no GPU
        if code:
            raise InitFailed(*INIT_REASONS.get(code, ("no_driver", f"nvmlInit failed: {code}")))
        version, _ = self.ask(nv.nvmlSystemGetDriverVersion)
        self.version = version or ""
        count, code = self.ask(nv.nvmlDeviceGetCount)
        if code:
            raise InitFailed("no_driver", f"nvmlDeviceGetCount failed: {code}")
        self.events, _ = self.ask(nv.nvmlEventSetCreate)
        if sleeping:
            # by address, because even asking a handle by index who it is would wake the sleepers
            self.devices = [Device(self, None, address) for address in functions]
        else:
            self.devices = [Device(self, index) for index in range(count)]
        for device in self.devices:
            if device.address not in sleeping:
                device.open()

    def ask(self, call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        """Call NVML; return (value, "") or (None, why) with why from a closed set."""
        try:
            return call(*args), ""
        except nv.NVMLLibraryMismatchError:  # not an NVMLError: pynvml is newer than the library
            return None, "no_symbol"
        except nv.NVMLError as err:
            if err.value == nv.NVML_SUCCESS:  # pynvml raises SUCCESS where a sizing call found nothing
                return None, "not_found"
            return None, CODES.get(err.value, f"error_{err.value}")
        except (TypeError, ValueError, UnicodeDecodeError):  # pynvml choked on what the driver wrote
            self.reject("unreadable")
            return None, "unreadable"

    def reject(self, why: str) -> None:
        """Count a value that cannot be true."""
        self.rejected[why] = self.rejected.get(why, 0) + 1

    def xids(self) -> list[list[Any]]:
        """Take the Xid events that are waiting: [UUID, number], at most 64 a reading."""
        found: list[list[Any]] = []
        while self.events is not None and any(d.watched for d in self.devices) and len(found) < 64:
            event, code = self.ask(nv.nvmlEventSetWait, self.events, 0)
            if code:
                break
            info, code = self.ask(nv.nvmlDeviceGetUUID, event.device)
            if not code and event.eventType == nv.nvmlEventTypeXidCriticalError:
                found.append([info, int(event.eventData)])
        return found

    def read(self, functions: list[str], sleeping: set[str]) -> dict[str, Any]:
        """Read every GPU that is not in *sleeping*; tell which of *functions* (sysfs addresses) NVML does not have."""
        gpus = [device.read(device.address in sleeping) for device in self.devices]
        if gpus and all(gpu.get("code") == "gone" for gpu in gpus if gpu["up"] is not None):
            awake = [gpu for gpu in gpus if gpu["up"] is not None]
            if awake:
                raise DriverGone("every GPU answers that the driver is not there")
        rejected, self.rejected = self.rejected, {}
        known = {device.address for device in self.devices}
        return {
            "driver": self.version,
            "gpus": gpus,
            "xids": self.xids(),
            "rejected": rejected,
            "missing": sum(address not in known for address in functions),
        }


class Device:
    """One GPU: its identity, read once, and its readings."""

    def __init__(self, driver: Driver, index: int | None, address: str = "") -> None:
        self.driver = driver
        self.index = index
        self.address = address
        self.watched = False
        self.readings = 0
        self.last_sample = 0
        self.memory_v2 = True
        self.calls = {
            "compute": [
                nv.nvmlDeviceGetComputeRunningProcesses_v3,
                nv.nvmlDeviceGetComputeRunningProcesses_v2,
            ],
            "graphics": [
                nv.nvmlDeviceGetGraphicsRunningProcesses_v3,
                nv.nvmlDeviceGetGraphicsRunningProcesses_v2,
            ],
            "mps": [
                nv.nvmlDeviceGetMPSComputeRunningProcesses_v3,
                nv.nvmlDeviceGetMPSComputeRunningProcesses_v2,
            ],
        }
        self.migs: dict[int, tuple[str, list[Any]]] = {}
        """GPU instance → its profile and the handles of its compute instances."""
        self.mig = False
        self.static: dict[str, Any] = {
            "index": index,
            "uuid": "",
            "bus": "",
            "name": "",
            "minor": None,
            "vgpu": False,
        }
        self.recovery: str | None = None
        self.handle: Any = None
        self.code = ""

    def open(self) -> None:
        """Get the handle, and find out who it is; the first time that the GPU is awake."""
        ask = self.driver.ask
        if self.index is not None:
            self.handle, self.code = ask(nv.nvmlDeviceGetHandleByIndex, self.index)
        else:
            self.handle, self.code = ask(nv.nvmlDeviceGetHandleByPciBusId, self.address.encode())
        if self.handle is not None:
            self._identify()
            events = self.driver.events
            if events is not None:
                _, code = ask(nv.nvmlDeviceRegisterEvents, self.handle, nv.nvmlEventTypeXidCriticalError, events)
                self.watched = not code

    def _identify(self) -> None:
        ask, handle = self.driver.ask, self.handle
        pci = ask(nv.nvmlDeviceGetPciInfo, handle)[0]
        bus = _text(pci.busId) if pci is not None else ""
        self.address = short_bus_id(bus) if bus else self.address
        if self.index is None:
            self.index = ask(nv.nvmlDeviceGetIndex, handle)[0]
        mode, _ = ask(nv.nvmlDeviceGetVirtualizationMode, handle)
        self.static.update(
            index=self.index,
            uuid=ask(nv.nvmlDeviceGetUUID, handle)[0] or "",
            bus=bus,
            name=ask(nv.nvmlDeviceGetName, handle)[0] or "",
            minor=ask(nv.nvmlDeviceGetMinorNumber, handle)[0],
            vgpu=mode in (nv.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU, nv.NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA),
        )

    def read(self, sleeps: bool) -> dict[str, Any]:
        """One reading. `up` is None for a GPU that sleeps: asking would wake it."""
        out = dict(self.static)
        if sleeps:
            out["up"] = None
            return out
        if self.handle is None and not self.code:
            self.open()
            out = dict(self.static)
        if self.handle is None:
            out.update(up=False, code=self.code)
            return out
        memory, kind, code = self._memory(self.handle)
        if code in ("lost", "gone", "timeout"):
            out.update(up=False, code=code)
            return out
        if self.readings % LAYOUT_EVERY == 0:
            self._layout()
            out.update(self.static)
        self.readings += 1
        total = memory[0] if memory and memory[0] is not None else NO_VALUE_64
        processes, gaps = self._processes(total)
        if memory is None and processes is None and code.startswith("error_"):
            # every call fails with a code that NVML has no name for: device files taken away, or a GPU in trouble
            out.update(up=False, code="gone" if code == "error_999" else code)
            return out
        out.update(up=True, memory=memory, kind=kind, gaps=gaps, mig=self.mig, recovery=self.recovery)
        if code:
            out["code"] = code
        rates, failed = self.driver.ask(nv.nvmlDeviceGetUtilizationRates, self.handle)
        out["gpu_percent"] = self._percent(rates.gpu) if not failed else None
        if self.mig:
            out["instances"] = self._instances(processes)
            out["processes"] = None
        else:
            out["processes"] = None if processes is None else [p[:4] for p in processes]
        return out

    def _memory(self, handle: Any) -> tuple[list[int | None] | None, str, str]:
        """[total, used, free, reserved or None], the kind of answer, and why there is none."""
        code = "no_symbol"
        if self.memory_v2:
            info, code = self.driver.ask(nv.nvmlDeviceGetMemoryInfo, handle, nv.nvmlMemory_v2)
            if not code:
                return self._sane(info.total, info.used, info.free, info.reserved), "dedicated", ""
            if code == "no_symbol":
                self.memory_v2 = False
        if code not in ("lost", "gone", "timeout", "no_permission"):
            # v2 fails with odd codes on some WSL drivers where v1 answers
            info, code = self.driver.ask(nv.nvmlDeviceGetMemoryInfo, handle)
            if not code:
                return self._sane(info.total, info.used, info.free, None), "dedicated_v1", ""
        return None, "unified" if code == "not_supported" else "unknown", code

    def _sane(self, total: int, used: int, free: int, reserved: int | None) -> list[int | None] | None:
        if not 0 < total < NO_VALUE_64 // 2 or used > total or free > total or (reserved or 0) > total:
            self.driver.reject("memory")
            return None
        return [total, used, free, reserved]

    def _percent(self, value: int) -> int | None:
        if 0 <= value <= 100:
            return value
        self.driver.reject("utilization")
        return None

    def _processes(self, total: int) -> tuple[list[list[Any]] | None, list[str]]:
        """[[pid, kind, bytes, SM percent, instance]] over the three lists, each process once, and the gaps."""
        found: dict[tuple[int, int], list[Any]] = {}
        gaps: list[str] = []
        failed = False
        for kind in ("compute", "graphics", "mps"):
            listed, code = self._list(self.handle, kind)
            if listed is None:
                if code == "no_permission":
                    gaps.append(code)
                if kind != "mps" and code not in ("not_supported", "no_symbol"):
                    failed = True
                elif kind == "compute":
                    gaps.append("not_supported")
                    failed = True
                continue
            for entry in listed:
                self._keep(found, entry, kind, total)
        if failed and not found:
            return None, gaps
        if failed:
            gaps.append("not_supported")
        samples = self._samples() if found else {}
        for entry in found.values():
            entry[3] = None if samples is None else samples.get(entry[0], 0)
        return list(found.values()), gaps

    def _list(self, handle: Any, kind: str) -> tuple[list[Any] | None, str]:
        calls = self.calls[kind]
        code = "no_symbol"
        while calls:
            for _ in range(SIZE_RACES):
                listed, code = self.driver.ask(calls[0], handle)
                if code != "size_race":
                    break
            if code != "no_symbol":
                break
            calls.pop(0)  # this library is older; what it lacks now it will always lack
        else:
            return None, code
        return (None, code) if code else (listed, "")

    def _keep(self, found: dict[tuple[int, int], list[Any]], entry: Any, kind: str, total: int) -> None:
        pid = int(entry.pid)
        if pid == 0 or pid == NO_VALUE_32:
            self.driver.reject("pid")
            return
        # pynvml turns the sentinel into None in some versions; 2^63-ish values are WSL's spelling of it
        used = entry.usedGpuMemory
        if used is not None and used >= NO_VALUE_64 // 2:
            used = None
        if used is not None and used > total:
            self.driver.reject("process_memory")
            used = None
        instance = getattr(entry, "gpuInstanceId", None)
        instance = -1 if instance is None or instance == NO_VALUE_32 else int(instance)
        old = found.get((pid, instance))
        if old is None:
            found[pid, instance] = [pid, kind, used, None, instance]
        else:  # one context that is listed twice is the same memory; a client of MPS is listed as compute too
            old[1] = "mps" if kind == "mps" else old[1]
            old[2] = used if (used or 0) > (old[2] or 0) else old[2]

    def _samples(self) -> dict[int, int] | None:
        samples, code = self.driver.ask(nv.nvmlDeviceGetProcessUtilization, self.handle, self.last_sample)
        if code:
            return {} if code == "not_found" else None
        latest: dict[int, tuple[int, int]] = {}
        for sample in samples:
            when = int(sample.timeStamp)
            self.last_sample = max(self.last_sample, when)
            if sample.pid and when >= latest.get(sample.pid, (0, 0))[0]:
                percent = self._percent(int(sample.smUtil))
                if percent is not None:
                    latest[sample.pid] = (when, percent)
        return {pid: percent for pid, (_, percent) in latest.items()}

    def _layout(self) -> None:
        ask = self.driver.ask
        if not (self.static["uuid"] and self.static["bus"]):
            self._identify()
        values, code = ask(nv.nvmlDeviceGetFieldValues, self.handle, [RECOVERY_FIELD])
        self.recovery = None
        if not code and values[0].nvmlReturn == nv.NVML_SUCCESS:
            self.recovery = RECOVERY_ACTIONS.get(values[0].value.uiVal, "unknown")
        mode, code = ask(nv.nvmlDeviceGetMigMode, self.handle)
        self.mig = not code and mode[0] == nv.NVML_DEVICE_MIG_ENABLE
        self.migs = {}
        if not self.mig:
            return
        most, code = ask(nv.nvmlDeviceGetMaxMigDeviceCount, self.handle)
        for index in range(0 if code else most):
            handle, code = ask(nv.nvmlDeviceGetMigDeviceHandleByIndex, self.handle, index)
            if code:
                continue  # slots are sparse
            instance, code = ask(nv.nvmlDeviceGetGpuInstanceId, handle)
            if code:
                continue
            if instance in self.migs:  # a second compute instance shares the memory of the first
                self.migs[instance][1].append(handle)
                continue
            name, _ = ask(nv.nvmlDeviceGetName, handle)
            profile = (name or "").rpartition("MIG ")[2]
            head, _, tail = profile.partition(".")
            self.migs[instance] = (tail if head.endswith("c") else profile, [handle])

    def _instances(self, processes: list[list[Any]] | None) -> list[dict[str, Any]]:
        """Memory and processes of each GPU instance."""
        out = []
        for instance, (profile, handles) in self.migs.items():
            memory, kind, code = self._memory(handles[0])
            gaps = {"no_permission"} if code == "no_permission" else set()
            own: list[list[Any]] | None = None
            if processes is not None:
                own = [p[:4] for p in processes if p[4] == instance]
            else:  # the parent may be closed to us inside a container while the instance is not
                found: dict[tuple[int, int], list[Any]] = {}
                for handle in handles:
                    listed, code = self._list(handle, "compute")
                    if listed is None:
                        gaps.add("no_permission" if code == "no_permission" else "not_supported")
                        break
                    for entry in listed:
                        self._keep(found, entry, "compute", memory[0] if memory and memory[0] else NO_VALUE_64)
                else:
                    own = [p[:4] for p in found.values()]
            answer = {"id": instance, "profile": profile, "memory": memory, "kind": kind, "processes": own}
            out.append(answer | {"gaps": sorted(gaps)})
        return out


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Bus:
    """The NVIDIA functions under *sysfs*: listed now and then, asked for their power state at every reading."""

    def __init__(self, sysfs: str) -> None:
        self.sysfs = sysfs
        self.functions: list[str] = []
        self.readings = 0

    def sleeping(self) -> set[str]:
        """Addresses of the functions that sleep."""
        if self.readings % LAYOUT_EVERY == 0:
            self.functions = nvidia_functions(self.sysfs)
        self.readings += 1
        return {address for address in self.functions if sleeps(self.sysfs, address)}


def answer(driver: Driver | None, bus: Bus) -> tuple[Driver | None, dict[str, Any]]:
    """Answer one request; the driver is initialised by the first one that finds a GPU awake."""
    sleeping = bus.sleeping()
    if driver is None:
        if bus.functions and len(sleeping) == len(bus.functions):
            return None, {"reason": "suspended", "detail": "every NVIDIA GPU sleeps; asking would wake it"}
        driver = Driver(bus.functions, sleeping)
    return driver, driver.read(bus.functions, sleeping)


def main(argv: list[str]) -> int:
    """Serve requests from standard input until it ends. *argv* is the sysfs root."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the daemon
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the daemon blocks its signals, and we inherit that
    gc.freeze()
    gc.set_threshold(20_000)  # a reading makes a few thousand objects, which need no collector to be freed
    bus = Bus(argv[0] if argv else "/sys")
    driver: Driver | None = None
    out = sys.stdout
    for _ in sys.stdin:
        end = False
        try:
            driver, reply = answer(driver, bus)
        except InitFailed as err:
            reply, end = {"reason": err.reason, "detail": err.detail}, True
        except DriverGone as err:
            reply, end = {"reason": "driver_lost", "detail": str(err)}, True
        try:
            out.write(json.dumps(reply, separators=(",", ":")) + "\n")
            out.flush()
        except BrokenPipeError:
            return 0
        if end:
            return 1
    if driver is not None:
        driver.ask(nv.nvmlShutdown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
