"""NVIDIA display functions on the PCI bus, from sysfs; standard library only, because the reader imports it."""

from __future__ import annotations

import os


def nvidia_functions(sysfs: str, procfs: str = "/proc", dev: str = "/dev") -> list[str]:
    """PCI addresses of the NVIDIA display functions under *sysfs* that are ours to watch.

    Left out are those given to a virtual machine, virtual functions, and those whose device file is not in *dev*:
    a container sees every GPU of its host in sysfs and only its own in /dev.
    """
    found = []
    folder = f"{sysfs}/bus/pci/devices"
    try:
        addresses = sorted(os.listdir(folder))
    except OSError:
        return []
    for address in addresses:
        try:
            if _line(f"{folder}/{address}/vendor") != "0x10de":
                continue
            if not _line(f"{folder}/{address}/class").startswith("0x03"):
                continue
        except OSError:
            continue
        if os.path.islink(f"{folder}/{address}/physfn"):
            continue  # a virtual function: no GPU of its own
        try:
            driver = os.path.basename(os.readlink(f"{folder}/{address}/driver"))
        except OSError:
            driver = ""
        minor = driver_facts(procfs, address.lower()).get("Device Minor", "")
        if driver != "vfio-pci" and (not minor.isdecimal() or os.path.exists(f"{dev}/nvidia{minor}")):
            found.append(address.lower())
    return found


def driver_facts(procfs: str, address: str) -> dict[str, str]:
    """What the driver's own file under *procfs* tells of a GPU; it needs no NVML and survives a lost GPU."""
    found = {}
    try:
        with open(f"{procfs}/driver/nvidia/gpus/{address}/information", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if "?" not in value:
                    found[name.strip()] = value.strip()
    except OSError:
        pass
    return found


def sleeps(sysfs: str, address: str) -> bool:
    """Whether the function at *address* is in runtime suspend; asking NVML about it would wake it."""
    try:
        return _line(f"{sysfs}/bus/pci/devices/{address}/power/runtime_status") == "suspended"
    except OSError:
        return False


def _line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(256).strip().lower()


def short_bus_id(bus_id: str) -> str:
    """NVML's ``00000000:1A:00.0`` spelled as sysfs does: ``0000:1a:00.0``."""
    domain, _, rest = bus_id.partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest.lower()}"
    except ValueError:
        return bus_id.lower()


def long_bus_id(address: str) -> str:
    """A sysfs address as NVML and DCGM Exporter spell it: ``00000000:1A:00.0``."""
    domain, _, rest = address.partition(":")
    return f"{domain:0>8}:{rest}".upper()
