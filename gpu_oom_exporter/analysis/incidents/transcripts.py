"""What does a pasted terminal session show about who holds GPU memory?

The daemon proves such things from NVML and /proc (`analysis/orphans.py`); here a person pastes what they saw,
so a verdict needs its evidence in the text: where there is none, there is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from gpu_oom_exporter.analysis.incidents.lines import number
from gpu_oom_exporter.analysis.incidents.scanning import Hit
from gpu_oom_exporter.catalog.categories import CATEGORIES
from gpu_oom_exporter.catalog.transcripts import ENGINE_PROCESS, IMPORTER_PROCESS, MPS_SERVER, OPENER
from gpu_oom_exporter.model import Incident, Value

MOST_LINES = 2000
MIB = 1024**2
HOST_PID_NAMESPACE = "pid:[4026531836]"
FLOOR_BYTES = 256 * MIB
"""Less than this in use on a GPU is contexts and the driver, not somebody's memory."""

LEAK_SAMPLES = 5
"""Fewer samples than this are no trend."""

_OPENS = re.compile(OPENER)
_COMMAND = re.compile(r"[\w.@:~/-]*[#$] (?:sudo )?(.*)")
_TABLE_ROW = re.compile(
    r"\|\s+(?P<gpu>\d{1,12})\s+(?:\S+\s+\S+\s+)?(?P<pid>\d{1,12})\s+(?P<type>C|G|C\+G|M\+C|M)\s+(?P<name>\S.*?)\s+(?P<used>\d{1,12})\s?MiB\s*\|"
)
_TABLE_GPU = re.compile(r"\|\s+(?P<gpu>\d{1,12})\s+\S.*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:")
_TABLE_USED = re.compile(r"(?P<used>\d{1,12})MiB\s*/\s*(?P<total>\d{1,12})MiB")
_QUERY = re.compile(r"--query-(?:compute-apps|accounted-apps)=(?P<columns>[\w.,]+)")
_SAMPLE = re.compile(
    r"\s*(?:\S+[ T])?(?P<hours>\d{1,12}):(?P<minutes>\d\d)(?::\d\d)?[ ,]+(?P<mib>\d{1,12})(?: ?MiB)?\s*$"
)
_GONE = re.compile(
    r"\((?:exited|dead|gone|no such process)\)|no such process|No such file or directory|<defunct>", re.I
)
_STACK = re.compile(r"\[nvidia\w*\]|\b(?:uvm|nv|rm|os)_\w+\+0x")
_ENGINE = re.compile(ENGINE_PROCESS, re.I)
_IMPORTER = re.compile(IMPORTER_PROCESS, re.I)
_CONTAINER_ID = re.compile(r"(?:docker|cri-containerd|libpod|crio)[-/](?P<id>[0-9a-f]{6,64})")


def opens(raw: bytes) -> bool:
    """Whether the line *raw* begins a terminal session."""
    return (raw[:1] in b"#$|" or b"# " in raw[:80] or b"$ " in raw[:80]) and _OPENS.match(
        raw[:400].decode("latin-1")
    ) is not None


@dataclass(slots=True)
class Row:
    """One process with GPU memory, as nvidia-smi lists it."""

    pid: int
    used_bytes: int
    name: str = ""
    kind: str = "C"
    gpu: int | None = None


@dataclass(slots=True)
class Seen:
    """What the session says, command by command."""

    rows: list[Row] = field(default_factory=list)
    used_bytes: dict[int, int] = field(default_factory=dict)
    nothing_runs: bool = False
    in_container: bool = False
    host_namespace: bool | None = None
    parents: dict[int, int] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    containers: set[str] | None = None
    cgroups: dict[int, str] = field(default_factory=dict)
    samples: list[tuple[float, int]] = field(default_factory=list)
    sampled_pid: int | None = None
    idle: bool = False
    stopped: bool = False  # somebody ended a container just now


class Transcript:
    """Collects a session, of at most `MOST_LINES` lines, and judges it at its end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.place = (1, 0)  # line and offset of its first line

    def take(self, raw: bytes, hit: Hit) -> bool:
        """Add a line; returns whether more are wanted."""
        if len(self.lines) >= MOST_LINES:
            return False
        if not self.lines:
            self.place = (hit.number, hit.offset)
        self.lines.append(raw[:4096].decode("ascii", "replace").rstrip())
        return True

    def judge(self) -> list[Incident]:
        """What the session shows, the most specific first; usually nothing or one."""
        seen = read(self.lines)
        for verdict in (_stuck, _leak, _mps, _zombie, _orphan, _importer, _idle, _hidden, _display):
            if (found := verdict(seen)) is not None:
                category, fields = found
                known = {name: value for name, value in fields.items() if value is not None}
                return [Incident(category, CATEGORIES[category].severity.value, known, *self.place)]
        return []


def read(lines: list[str]) -> Seen:
    """The facts in *lines*."""
    seen = Seen()
    command = "nvidia-smi"
    columns: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    gpu: int | None = None
    listed_ps: list[int] = []
    for text in lines:
        if (match := _COMMAND.match(text)) is not None:
            _finish_ps(seen, command, listed_ps)
            if _TOOL.search(match[1]) is not None:  # else a remark: the last command goes on
                command, listed_ps = match[1], []
                columns = _columns(command)
                asked = columns or asked
            elif match[1].startswith("after"):
                columns = asked
            _note_command(seen, match[1])
            continue
        if HOST_PID_NAMESPACE in text or re.search(r"pid:\[\d{1,12}\]", text):
            seen.host_namespace = HOST_PID_NAMESPACE in text
        if "No running processes found" in text:
            seen.nothing_runs = True
        if (row := _TABLE_ROW.search(text)) is not None:
            seen.rows.append(Row(int(row["pid"]), int(row["used"]) * MIB, row["name"], row["type"], int(row["gpu"])))
        elif (match := _TABLE_GPU.match(text)) is not None:
            gpu = int(match["gpu"])
        elif gpu is not None and (match := _TABLE_USED.search(text)) is not None:
            seen.used_bytes[gpu] = int(match["used"]) * MIB
        elif columns and "," in text:
            _note_csv(seen, columns, text)
        elif command.startswith("ps") or "; ps " in command:
            listed_ps += _note_ps(seen, command, text)
        else:
            _note_other(seen, command, text)
    _finish_ps(seen, command, listed_ps)
    return seen


_TOOL = re.compile(
    r"\b(?:nvidia-smi|ps|cat|ls|readlink|docker|podman|crictl|kubectl|kill|grep|ss|tail|echo|curl|GET|pid)\b"
)


def _columns(command: str) -> tuple[str, ...]:
    match = _QUERY.search(command)
    return tuple(match["columns"].split(",")) if match else ()


def _note_command(seen: Seen, command: str) -> None:
    if re.search(r"\b(?:inside|in) (?:the |a )?(?:container|pod)|docker exec|kubectl exec", command):
        seen.in_container = True
    if (match := re.search(r"(?:utilization|util)\S* max ?= ?(\d{1,12})", command)) is not None:
        seen.idle = int(match[1]) == 0
    if (match := re.match(r"pid (\d{1,12}) .*(?:used_memory|MiB)", command)) is not None:
        seen.sampled_pid = int(match[1])
    if (match := re.search(r"kill (?:-9|-KILL|-s KILL) (\d{1,12})", command)) is not None:
        seen.killed.add(int(match[1]))
    if "--query-compute-apps" in command or re.match(r"after\b", command):
        seen.rows.clear()  # the newer list is the truth
    if re.match(r"(?:docker|podman|crictl) ps", command):
        seen.containers = set()
    if re.match(r"(?:docker|podman|crictl) (?:rm|stop|kill)|kubectl delete", command):
        seen.stopped = True


def _note_csv(seen: Seen, columns: tuple[str, ...], text: str) -> None:
    cells = dict(zip(columns, (cell.strip() for cell in text.split(",")), strict=False))
    pid, used = cells.get("pid", ""), cells.get("used_memory") or cells.get("used_gpu_memory") or ""
    amount = re.match(r"([0-9]+)", used)
    if (held_by := number(pid)) is not None and amount:
        seen.rows.append(Row(held_by, int(amount[1][:12]) * MIB, cells.get("name") or cells.get("process_name") or ""))


def _note_ps(seen: Seen, command: str, text: str) -> list[int]:
    """One line of ``ps``; returns the PIDs that it lists."""
    order = re.search(r"-?o +([\w,=]+)", command)
    names = [name.split("=")[0] for name in order[1].split(",")] if order else ["pid"]
    cells = text.split(None, len(names) - 1)
    row = dict(zip(names, cells, strict=False))
    pid, parent = number(row.get("pid", "")), number(row.get("ppid", ""))
    if pid is None:
        return []
    if parent is not None:
        seen.parents[pid] = parent
    state = row.get("stat") or row.get("state") or row.get("s")
    if state:
        seen.states[pid] = state
    seen.names[pid] = row.get("cmd") or row.get("comm") or row.get("args") or row.get("command") or ""
    if _GONE.search(text) and not (state and not state.startswith("Z")):
        seen.gone.add(pid)
    return [pid]


def _finish_ps(seen: Seen, command: str, listed: list[int]) -> None:
    """PIDs that ``ps -p`` was asked for and did not list are gone."""
    if command.startswith("ps") and (match := re.search(r"-p ?([\d,]+)", command)) is not None:
        seen.gone.update(int(pid) for pid in match[1].split(",") if pid and int(pid) not in listed)


def _note_other(seen: Seen, command: str, text: str) -> None:
    if (match := re.search(r"/proc/(\d{1,12})\b", command)) is not None:
        pid = int(match[1])
        if _GONE.search(text):
            named = re.search(r"/proc/(\d{1,12})\b", text)
            seen.gone.add(int(named[1]) if named else pid)
        elif "stack" in command and _STACK.search(text):
            seen.stuck.add(pid)
        elif "cgroup" in command and (container := _CONTAINER_ID.search(text)) is not None:
            seen.cgroups[pid] = container["id"]
        elif "status" in command and (state := re.match(r"State:\s+(\w)", text)) is not None:
            seen.states[pid] = state[1]
        elif "stat" in command and (state := re.match(r"\d{1,12} \(.*\) (\w) (\d{1,12})", text)) is not None:
            seen.states[pid] = state[1]
            seen.parents[pid] = int(state[2])
    elif seen.containers is not None and re.match(r"(?:docker|podman|crictl) ps", command):
        if (match := re.match(r"([0-9a-f]{6,64})\s", text)) is not None:
            seen.containers.add(match[1])
    elif seen.sampled_pid is not None and (match := _SAMPLE.match(text)) is not None:
        seen.samples.append((int(match["hours"]) + int(match["minutes"]) / 60, int(match["mib"]) * MIB))


Verdict = tuple[str, dict[str, Value | None]]


def _row(seen: Seen, pid: int) -> Row | None:
    return next((row for row in seen.rows if row.pid == pid), None)


def _stuck(seen: Seen) -> Verdict | None:
    for pid in seen.stuck:
        if seen.states.get(pid, "D")[0] in "DR" and (pid in seen.killed or not seen.killed):
            row = _row(seen, pid)
            return "driver_stuck_process", {"pid": pid, "used_bytes": row.used_bytes if row else None}
    return None


def _leak(seen: Seen) -> Verdict | None:
    if len(seen.samples) < LEAK_SAMPLES:
        return None
    samples: list[tuple[float, int]] = []
    day = 0.0
    for hours, used in seen.samples:
        if samples and hours + day < samples[-1][0]:
            day += 24.0
        samples.append((hours + day, used))
    slope = fit(samples)
    late = samples[len(samples) // 2 :]
    grows = all(after >= before for (_, before), (_, after) in pairwise(samples))
    if slope < MIB or not grows or fit(late) < slope / 2:
        return None
    return "vram_slow_leak", {"pid": seen.sampled_pid, "slope_bytes_per_hour": round(slope)}


def fit(samples: list[tuple[float, int]]) -> float:
    """Slope of the least-squares line, in bytes per hour; 0 without a spread in time."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def _zombie(seen: Seen) -> Verdict | None:
    for row in seen.rows:
        if row.kind.startswith("M") or MPS_SERVER in row.name:
            continue
        if seen.states.get(row.pid, "").startswith("Z") or (row.pid in seen.gone and seen.host_namespace):
            return "zombie_vram_dead_pid", {"gpu": row.gpu, "pid": row.pid, "used_bytes": row.used_bytes}
        if row.pid in seen.gone and (seen.host_namespace is False or seen.in_container):
            return "pid_namespace_hidden", {"gpu": row.gpu}
    return None


def _mps(seen: Seen) -> Verdict | None:
    server = next((row for row in seen.rows if MPS_SERVER in row.name), None)
    if server is None:
        return None
    others = [row for row in seen.rows if row is not server and row.pid != server.pid]
    if others and not any(row.pid in seen.gone for row in others):
        return None
    return "mps_server_holder", {"gpu": server.gpu, "pid": server.pid}


def _orphan(seen: Seen) -> Verdict | None:
    engines = [row for row in seen.rows if _ENGINE.search(row.name) or _ENGINE.search(seen.names.get(row.pid, ""))]
    if not engines:
        return None
    pids = [row.pid for row in engines]
    fields: dict[str, Value | None] = {"pids": pids, "gpu_processes": len(pids)}
    fields["used_bytes"] = max(row.used_bytes for row in engines)
    if seen.containers is not None and any(_unknown(seen.containers, seen.cgroups.get(pid)) for pid in pids):
        return "orphaned_worker", {**fields, "container_gone": True}
    tops = {_top(seen, pid) for pid in pids}
    if seen.host_namespace and all(seen.parents.get(top) == 1 for top in tops):
        root = tops.pop() if len(tops) == 1 else None
        return "orphaned_worker", {**fields, "root_pid": root}
    return None


def _unknown(containers: set[str], wanted: str | None) -> bool:
    return wanted is not None and not any(wanted.startswith(known) or known.startswith(wanted) for known in containers)


def _top(seen: Seen, pid: int) -> int:
    for _ in range(64):
        parent = seen.parents.get(pid)
        if parent is None or parent not in seen.parents:
            return pid
        pid = parent
    return pid


def _importer(seen: Seen) -> Verdict | None:
    importers = [
        row for row in seen.rows if _IMPORTER.search(row.name) or _IMPORTER.search(seen.names.get(row.pid, ""))
    ]
    engines = [
        row for row in seen.rows if row not in importers and _ENGINE.search(row.name) and row.pid not in seen.gone
    ]
    if not importers or engines or not (seen.gone or seen.containers is not None or seen.killed or seen.stopped):
        return None
    worst = max(importers, key=lambda row: row.used_bytes)
    return "ipc_handle_holder", {"gpu": worst.gpu, "pid": worst.pid, "used_bytes": worst.used_bytes}


def _idle(seen: Seen) -> Verdict | None:
    if not seen.idle or not seen.rows:
        return None
    worst = max(seen.rows, key=lambda row: row.used_bytes)
    return "idle_holder", {"gpu": worst.gpu, "pid": worst.pid, "used_bytes": worst.used_bytes}


def _hidden(seen: Seen) -> Verdict | None:
    if seen.rows or seen.nothing_runs or not (seen.in_container or seen.host_namespace is False):
        return None
    gpu = next((gpu for gpu, used in seen.used_bytes.items() if used >= FLOOR_BYTES), None)
    return None if gpu is None else ("pid_namespace_hidden", {"gpu": gpu})


def _display(seen: Seen) -> Verdict | None:
    if not seen.rows or any("G" not in row.kind for row in seen.rows):
        return None
    gpu = seen.rows[0].gpu
    rows = [row for row in seen.rows if row.gpu == gpu]
    return "display_holder", {
        "gpu": gpu,
        "used_bytes": sum(row.used_bytes for row in rows),
        "pids": [row.pid for row in rows],
        "gpu_processes": len(rows),
    }
