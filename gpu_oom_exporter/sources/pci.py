"""NVIDIA display functions on the PCI bus, from sysfs; standard library only, because the reader imports it."""

from __future__ import annotations

import os


def nvidia_functions(sysfs: str) -> list[str]:
    """PCI addresses of the NVIDIA display functions under *sysfs* that are not given to a virtual machine."""
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
        try:
            driver = os.path.basename(os.readlink(f"{folder}/{address}/driver"))
        except OSError:
            driver = ""
        if driver != "vfio-pci":
            found.append(address.lower())
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
    return f"{domain[-4:]}:{rest}".lower()


def long_bus_id(address: str) -> str:
    """A sysfs address as NVML and DCGM Exporter spell it: ``00000000:1A:00.0``."""
    domain, _, rest = address.partition(":")
    return f"{domain:0>8}:{rest}".upper()
