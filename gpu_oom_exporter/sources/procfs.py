"""Who a PID is: command, user, state, parent, start time, cgroup, listening ports; from a /proc tree.

A process that ends between two reads is normal and simply not there. `cmdline` is read once per process and
never of one in uninterruptible sleep: the read waits for a lock that a process stuck in the driver holds.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpu_oom_exporter.model import Process

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The initial PID namespace has a fixed inode (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

ARGV_BYTES = 16384
"""As much of a command line as is looked at."""

READ_BYTES = 16384

PORTS_AGAIN_SECONDS = 10.0
"""How long a process's listening ports are believed: an engine opens its port minutes after its start."""


@dataclass(slots=True)
class _Known:
    process: Process
    looked: float
    ports_at: float = float("-inf")


class Reader:
    """Reads processes under *root*, remembering what cannot change while a process lives."""

    def __init__(self, root: str = "/proc", fresh_seconds: float = 2.0) -> None:
        self.root = root
        self.fresh_seconds = fresh_seconds
        self._known: dict[int, _Known] = {}
        self._users: dict[int, str] = {}
        self._servers: dict[int, tuple[int, str, tuple[str, ...]]] = {}

    def host_pids(self) -> bool:
        """Whether this process sees the PIDs that NVML names."""
        try:
            return self._link("self/ns/pid") == HOST_PID_NAMESPACE
        except OSError:
            return False

    def wsl(self) -> bool:
        """Whether this kernel is WSL's: Windows keeps the memory of each process to itself."""
        return b"microsoft" in (self._bytes("sys/kernel/osrelease") or b"").lower()

    def families(self, pids: Iterable[int], mono: float) -> dict[int, Process]:
        """The processes *pids* that still live, and their ancestors up to PID 1 (not included)."""
        found: dict[int, Process] = {}
        for pid in pids:
            while pid > 1 and pid not in found:
                process = self.look(pid, mono)
                if process is None:
                    break
                found[pid] = process
                pid = process.ppid
        for pid in [pid for pid in self._known if pid not in found]:
            del self._known[pid]
        return found

    def look(self, pid: int, mono: float) -> Process | None:
        """The process *pid*, or None when it is gone or hidden from us."""
        known = self._known.get(pid)
        if known is not None and mono - known.looked < self.fresh_seconds:
            return known.process
        stat = self.stat(pid)
        if stat is None:
            self._known.pop(pid, None)
            return None
        comm, state, ppid, start = stat
        if known is None or known.process.start_ticks != start or known.process.comm != comm:
            known = _Known(self._identify(Process(pid, start, comm, state, ppid)), mono)
        elif known.process.state != state or known.process.ppid != ppid:
            known.process = replace(known.process, state=state, ppid=ppid)
        known.looked = mono
        if mono - known.ports_at >= PORTS_AGAIN_SECONDS:
            known.ports_at = mono
            ports = self.listening(pid)
            if ports != known.process.listening:
                known.process = replace(known.process, listening=ports)
        self._known[pid] = known
        return known.process

    def stat(self, pid: int) -> tuple[str, str, int, int] | None:
        """(comm, state, parent, start time in ticks since boot) of *pid*, or None when it is gone."""
        text = self._bytes(f"{pid}/stat")
        if text is None:
            return None
        # comm may hold blanks, brackets and newlines: it ends at the last bracket
        head, _, tail = text.rpartition(b")")
        fields = tail.split(None, 20)
        try:
            comm = head.partition(b"(")[2].decode(errors="replace")
            return comm, fields[0].decode(), int(fields[1]), int(fields[19])
        except (IndexError, ValueError):
            return None

    def age_seconds(self, process: Process) -> float | None:
        """Seconds since *process* started, or None when the uptime cannot be read."""
        text = self._bytes("uptime")
        try:
            return max(0.0, float((text or b"").split()[0]) - process.start_ticks / os.sysconf("SC_CLK_TCK"))
        except (IndexError, ValueError):
            return None

    def servers(self, serves: Callable[[tuple[str, ...]], bool]) -> list[Process]:
        """Every process whose command line *serves* accepts; a command line is read once per process."""
        found = []
        alive = set()
        for pid in self._pids():
            stat = self.stat(pid)
            if stat is None:
                continue
            alive.add(pid)
            comm, state, ppid, start = stat
            seen = self._servers.get(pid)
            if seen is None or seen[:2] != (start, comm):
                seen = (start, comm, self._argv(pid, state))
                self._servers[pid] = seen
            if serves(seen[2]):
                found.append(Process(pid, start, comm, state, ppid, argv=seen[2]))
        for pid in self._servers.keys() - alive:
            del self._servers[pid]
        return found

    def listening(self, pid: int) -> frozenset[int] | None:
        """TCP ports that *pid* listens on; None when we may not look, or it is in another network namespace."""
        try:
            if self._link(f"{pid}/ns/net") != self._link("self/ns/net"):
                return None
            names = self._list(f"{pid}/fd")
        except OSError:
            return None
        inodes = set()
        for name in names:
            try:
                target = self._link(f"{pid}/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1].encode())
        if not inodes:
            return frozenset()
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in (self._bytes(f"{pid}/net/{table}") or b"").splitlines()[1:]:
                columns = line.split()
                if len(columns) > 9 and columns[3] == b"0A" and columns[9] in inodes:
                    ports.add(int(columns[1].rpartition(b":")[2], 16))
        return frozenset(ports)

    def _identify(self, process: Process) -> Process:
        pid = process.pid
        user, cgroup = "", ""
        for line in (self._bytes(f"{pid}/status") or b"").splitlines():
            if line.startswith(b"Uid:"):
                user = self._user(int(line.split()[1]))
                break
        for entry in (self._bytes(f"{pid}/cgroup") or b"").decode(errors="replace").splitlines():
            number, _, rest = entry.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" or (not cgroup and "memory" in controllers.split(",")):
                cgroup = path
                if path != "/":
                    break
        return replace(process, user=user, cgroup=cgroup, argv=self._argv(pid, process.state))

    def _argv(self, pid: int, state: str) -> tuple[str, ...]:
        if state in "DZ":
            return ()
        text = (self._bytes(f"{pid}/cmdline") or b"")[:ARGV_BYTES]
        return tuple(part.decode(errors="replace") for part in text.rstrip(b"\0 ").split(b"\0")) if text else ()

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    def _pids(self) -> list[int]:
        try:
            return [int(name) for name in self._list("") if name.isdecimal()]
        except OSError:
            return []

    # the three ways in which /proc is touched; a simulated host overrides these and nothing else

    def _list(self, path: str) -> list[str]:
        return os.listdir(f"{self.root}/{path}")

    def _link(self, path: str) -> str:
        return os.readlink(f"{self.root}/{path}")

    def _bytes(self, path: str) -> bytes | None:
        try:
            # plain descriptors: a file object costs as much as the read, for hundreds of reads a second
            file = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gone or hidden: either way there is nothing to tell
            return None
        try:
            data = os.read(file, READ_BYTES)
            while more := os.read(file, READ_BYTES):  # a table comes in pieces that end where a line ends
                data += more
            return data
        except OSError:
            return None
        finally:
            os.close(file)
