"""Why did it happen? One or two sentences with the numbers of the log, re-told from parsed fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_oom_exporter.analysis.incidents.judging import co_tenants, listed
from gpu_oom_exporter.catalog.categories import CATEGORIES
from gpu_oom_exporter.model import Incident

Fields = Mapping[str, Any]


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def cause(incident: Incident) -> str:
    """Why *incident* happened, with its numbers where the log had them."""
    why = CATEGORIES[incident.category].why
    numbers = next(filter(None, (tell(incident.fields) for tell in _TELLERS)), "")
    return f"{why} {numbers}".strip()


def own_bytes(fields: Fields) -> int | None:
    """What the failing process itself held, in bytes.

    In a container PyTorch cannot find itself, and the process it lists is the engine with its host PID.
    """
    known = fields.get("process_bytes")
    pool = int(fields.get("allocated_bytes", 0) + fields.get("reserved_unallocated_bytes", 0))
    if known:
        return max(int(known), pool)
    own = [int(process["used_bytes"]) for process in listed(fields) if process["used_bytes"] >= pool]
    return max(own, default=pool or None)


def _allocation(fields: Fields) -> str:
    tried, free = fields.get("tried_bytes"), fields.get("free_bytes")
    if tried is None:
        return ""
    told = [f"It asked for {size(tried)}"]
    if free is not None:
        total = fields.get("total_bytes")
        told.append(f"with {size(free)} free" + (f" of {size(total)}" if total else ""))
    sentence = " ".join(told) + "."
    if (slack := fields.get("reserved_unallocated_bytes")) is not None and slack >= tried:
        sentence += f" {size(slack)} of its pool lay unused in pieces."
    others = co_tenants(fields)
    for process in listed(fields):
        if process["pid"] in others:
            sentence += f" PID {process['pid']} holds {size(process['used_bytes'])}."
    if not fields.get("process_bytes"):
        pool = fields.get("allocated_bytes", 0) + (slack or 0)
        for process in listed(fields):
            if process["used_bytes"] >= pool > 0:
                sentence += f" PID {process['pid']} in the text is this process, as the host sees it."
    return sentence


def _kv_needed(fields: Fields) -> str:
    if "max_model_len" not in fields:
        return ""
    length = fields["max_model_len"]
    if fields.get("kv_needed_bytes") and "kv_available_bytes" in fields:
        told = (
            f"One request of {length} tokens needs {size(fields['kv_needed_bytes'])} of KV cache; "
            f"{size(fields['kv_available_bytes'])} are available."
        )
    elif "kv_cache_tokens" in fields:
        told = f"One request may have {length} tokens; the cache holds {fields['kv_cache_tokens']}."
    else:
        told = f"One request may have {length} tokens."
    if fits := fields.get("estimated_max_model_len"):
        told += f" {fits} tokens would fit."
    return told


def _start(fields: Fields) -> str:
    if "desired_bytes" not in fields or "free_bytes" not in fields:
        return ""
    desired, free = fields["desired_bytes"], fields["free_bytes"]
    return f"The engine wants {size(desired)} and {size(free)} are free: {size(max(0, desired - free))} must go."


def _profiling(fields: Fields) -> str:
    if "initial_free_bytes" not in fields or "current_free_bytes" not in fields:
        return ""
    return f"{size(fields['initial_free_bytes'])} were free before, {size(fields['current_free_bytes'])} after."


def _wanted(fields: Fields) -> str:
    if "required_bytes" in fields and "available_bytes" in fields:
        return f"It needs {size(fields['required_bytes'])}; {size(fields['available_bytes'])} are available."
    if "required_bytes" in fields and "limit_bytes" in fields:
        return f"It needs {size(fields['required_bytes'])}; the hardware has {size(fields['limit_bytes'])}."
    if "requested_bytes" in fields:
        return f"It asked for {size(fields['requested_bytes'])}."
    return ""


def _killed(fields: Fields) -> str:
    if "task" not in fields:
        return ""
    told = f"Killed: PID {fields.get('pid', '?')} ({fields['task']})"
    if "anon_rss_bytes" in fields:
        told += f", which had {size(fields['anon_rss_bytes'])} of RAM"
    if (invoker := fields.get("invoker")) and invoker != fields["task"]:
        told += f"; {invoker} asked for memory"
    return told + "."


def _xid(fields: Fields) -> str:
    if "xid" not in fields:
        return ""
    told = f"Xid {fields['xid']} on {fields.get('pci', '?')}"
    if process := fields.get("process"):
        told += f", process {process}"
    return told + "."


_TELLERS: tuple[Callable[[Fields], str], ...] = (_kv_needed, _start, _profiling, _killed, _xid, _allocation, _wanted)
"""Each tells the fields it knows, or nothing; the first that can does."""
