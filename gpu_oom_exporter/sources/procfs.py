"""Who a PID is: command, user, state, parent, start time, cgroup, listening ports; from a /proc tree.

A process that ends between two reads is normal and simply not there. `cmdline` is read once per process and
never of one in uninterruptible sleep: the read waits for a lock that a process stuck in the driver holds.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpu_oom_exporter.catalog.containers import workload_of
from gpu_oom_exporter.catalog.engines import ADOPTERS, role_of
from gpu_oom_exporter.model import Process
from gpu_oom_exporter.sources.cgroups import room_ratio

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The initial PID namespace has a fixed inode (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

ARGV_BYTES = 4096
"""As much of a command line as is looked at."""

ARGV_LOOKS = 2
"""How often a command line is read: it may have been seen between fork and exec, or in uninterruptible sleep."""

READ_BYTES = 16384

SCAN_SECONDS = 4.0
STACK_CHARACTERS = 600
FREEZERS = 1024
THREADS = 256
"""As many threads of one process are looked at before its command line is read, once in its life."""
ANCESTORS = 64
"""Deeper than any real tree; a torn reading could make a loop."""

PORTS_AGAIN_SECONDS = 10.0
"""How long a process's listening ports are believed: an engine opens its port minutes after its start."""

SIGKILL_BIT = 1 << 8
"""Bit of signal 9 in SigPnd and ShdPnd."""


@dataclass(slots=True)
class _Known:
    process: Process
    looked: float
    ports_at: float = float("-inf")
    remote_at: float = float("-inf")
    freezer: str = ""
    memory: str = ""
    argv_looks: int = 1


class Reader:
    """Reads processes under *root*, remembering what cannot change while a process lives."""

    def __init__(self, root: str = "/proc", fresh_seconds: float = 2.0, cgroupfs: str = "/sys/fs/cgroup") -> None:
        self.root = root
        self.cgroupfs = cgroupfs
        self.fresh_seconds = fresh_seconds
        self._known: dict[int, _Known] = {}
        self._users: dict[int, str] = {}
        self._scanned: list[Process] = []
        self._scanned_at = float("-inf")
        self._pass = float("-inf")
        self._tables: dict[str, list[tuple[bytes, bytes, bytes, bytes]]] = {}
        self._freezers: dict[str, tuple[float, bool]] = {}
        self._rooms: dict[str, tuple[float, float | None]] = {}
        self._census: dict[int, tuple[int, str]] = {}
        self._census_at = float("-inf")
        self._servers: dict[int, tuple[int, str, tuple[str, ...], int]] = {}

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
        """The processes *pids* that still live, their ancestors, and the relatives of workers without a server.

        Ancestors go up to PID 1, which is not included.
        """
        found: dict[int, Process] = {}
        first = list(pids)
        for pid in first:
            while pid > 1 and pid not in found:
                process = self.look(pid, mono)
                if process is None:
                    break
                found[pid] = process
                pid = process.ppid
        lost = [found[pid] for pid in first if pid in found and self._lost_its_parent(found[pid], found)]
        for relative in self._relatives(lost, mono) if lost else ():
            found[relative.pid] = relative
        for pid in [pid for pid in self._known if pid not in found]:
            del self._known[pid]
        return found

    @staticmethod
    def _lost_its_parent(process: Process, found: dict[int, Process]) -> bool:
        """Whether *process*, or the worker above it, hangs on an adopter: then its relatives decide what it is."""
        for _ in range(ANCESTORS):
            role = role_of(process.comm, process.argv)
            if role is not None and role[1] != "worker":
                return False
            parent = found.get(process.ppid)
            if parent is None:
                return process.ppid == 1
            if parent.init or parent.comm in ADOPTERS:
                return True
            process = parent
        return False

    def _relatives(self, lost: list[Process], mono: float) -> list[Process]:
        """Processes of the sessions and containers of *lost*, themselves included, with their remote connections."""
        if mono - self._census_at >= PORTS_AGAIN_SECONDS:
            self._census_at = mono
            self._census = {}
            for pid in self._pids():
                stat = self.stat(pid)
                if stat is not None:
                    self._census[pid] = (stat[4], self._cgroups(pid)[0])
        sessions = {process.session for process in lost} - {0}
        cgroups = {process.cgroup for process in lost if workload_of(process.cgroup) is not None}
        pids = {process.pid for process in lost}
        pids |= {pid for pid, (session, cgroup) in self._census.items() if session in sessions or cgroup in cgroups}
        found = []
        for pid in sorted(pids):
            relative = self.look(pid, mono)
            if relative is None:
                continue
            known = self._known[pid]
            if mono - known.remote_at >= PORTS_AGAIN_SECONDS:
                known.remote_at = mono
                known.process = replace(known.process, remote=self.remote(pid))
            found.append(known.process)
        return found

    def exists(self, pid: int) -> bool:
        """Whether the kernel knows *pid*; one that is hidden from us or not ours exists."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    def look(self, pid: int, mono: float) -> Process | None:
        """The process *pid*, or None when it is gone or hidden from us."""
        known = self._known.get(pid)
        if known is not None and mono - known.looked < self.fresh_seconds:
            return known.process
        if mono != self._pass:
            self._pass = mono
            self._tables.clear()
        stat = self.stat(pid)
        if stat is None:
            self._known.pop(pid, None)
            return None
        comm, state, ppid, start, session = stat
        if known is None or known.process.start_ticks != start or known.process.comm != comm:
            known = _Known(self._identify(Process(pid, start, comm, state, ppid, session=session)), mono)
            _, known.freezer, known.memory = self._cgroups(pid)
        elif known.process.state != state or known.process.ppid != ppid:
            known.process = replace(known.process, state=state, ppid=ppid)
        if (not known.process.argv or known.argv_looks < ARGV_LOOKS) and known.looked < mono and state not in "ZX":
            argv = self._argv(pid, state)
            known.argv_looks += 1
            known.process = replace(known.process, argv=argv) if argv else known.process
        known.looked = mono
        # spread by PID, so that not every process is looked at anew in one reading
        if mono - known.ports_at >= PORTS_AGAIN_SECONDS * (0.5 + (pid % 32) / 64):
            known.ports_at = mono
            ports = self.listening(pid)
            if ports != known.process.listening:
                known.process = replace(known.process, listening=ports)
        room = self._room(known.memory, mono)
        if room != known.process.memory_room_ratio:
            known.process = replace(known.process, memory_room_ratio=room)
        trouble = self._trouble(pid, state, known.freezer, mono)
        now = known.process
        if trouble != (now.frozen, now.sigkill, now.stack, now.live_threads, now.children):
            frozen, sigkill, stack, threads, children = trouble
            known.process = replace(
                now, frozen=frozen, sigkill=sigkill, stack=stack, live_threads=threads, children=children
            )
        self._known[pid] = known
        return known.process

    def _trouble(
        self, pid: int, state: str, freezer: str, mono: float
    ) -> tuple[bool, bool, str, tuple[int, ...], tuple[int, ...]]:
        """(frozen, SIGKILL pending, kernel stack, live threads, children): what only a process in trouble has."""
        frozen = bool(freezer) and self._frozen(freezer, mono)
        if state in "DR":
            if not self._sigkill_pending(pid):
                return frozen, False, "", (), ()
            stack = (self._bytes(f"{pid}/stack") or b"").decode(errors="replace")
            return frozen, True, " ".join(stack.split())[:STACK_CHARACTERS], (), ()
        if state == "Z":
            threads, children = self._kept_by(pid)
            return frozen, False, "", threads, children
        return frozen, False, "", (), ()

    def _sigkill_pending(self, pid: int) -> bool:
        for line in (self._bytes(f"{pid}/status") or b"").splitlines():
            if line.startswith((b"SigPnd:", b"ShdPnd:")):
                try:
                    if int(line.split()[1], 16) & SIGKILL_BIT:
                        return True
                except (IndexError, ValueError):
                    continue
        return False

    def _kept_by(self, pid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(live threads, children) of a zombie: what keeps its memory from being freed."""
        threads = []
        children = []
        try:
            tasks = [int(name) for name in self._list(f"{pid}/task") if name.isdecimal()]
        except OSError:
            tasks = []
        for task in tasks:
            stat = self.stat(f"{pid}/task/{task}")
            if stat is not None and stat[1] not in "ZX":
                threads.append(task)
            # the kernel gives a zombie's children to its adopter; a live thread still has its own
            text = self._bytes(f"{pid}/task/{task}/children") or b""
            children += [int(word) for word in text.split() if word.isdigit()]
        return tuple(threads), tuple(children)

    def _room(self, folder: str, mono: float) -> float | None:
        at, room = self._rooms.get(folder, (float("-inf"), None))
        if mono - at >= self.fresh_seconds:  # the processes of one container ask for the same folder
            room = room_ratio(self.cgroupfs, folder)
            if len(self._rooms) > FREEZERS:
                self._rooms.clear()
            self._rooms[folder] = (mono, room)
        return room

    def _frozen(self, freezer: str, mono: float) -> bool:
        at, frozen = self._freezers.get(freezer, (float("-inf"), False))
        if mono - at < self.fresh_seconds:
            return frozen  # the processes of one container ask for the same file
        try:
            with open(f"{self.cgroupfs}/{freezer}", encoding="ascii", errors="replace") as file:
                text = file.read(4096)
        except OSError:
            text = ""
        frozen = "frozen 1" in text or text.strip() in ("FROZEN", "FREEZING")
        if len(self._freezers) > FREEZERS:
            self._freezers.clear()
        self._freezers[freezer] = (mono, frozen)
        return frozen

    def stat(self, pid: int | str) -> tuple[str, str, int, int, int] | None:
        """(comm, state, parent, start in ticks since boot, session) of *pid*, or None when it is gone."""
        text = self._bytes(f"{pid}/stat")
        if text is None:
            return None
        # comm may hold blanks, brackets and newlines: it ends at the last bracket
        head, _, tail = text.rpartition(b")")
        fields = tail.split(None, 20)
        try:
            comm = head.partition(b"(")[2].decode(errors="replace")
            return comm, fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[3])
        except (IndexError, ValueError):
            return None

    def age_seconds(self, process: Process) -> float | None:
        """Seconds since *process* started, or None when the uptime cannot be read."""
        text = self._bytes("uptime")
        try:
            return max(0.0, float((text or b"").split()[0]) - process.start_ticks / os.sysconf("SC_CLK_TCK"))
        except (IndexError, ValueError):
            return None

    def servers(self, serves: Callable[[tuple[str, ...]], bool], mono: float = float("inf")) -> list[Process]:
        """Every process whose command line *serves* accepts; a command line is read once per process.

        Several engines that are down share one look at the host's processes every few seconds.
        """
        if not mono - self._scanned_at < SCAN_SECONDS:
            self._scanned_at = mono
            self._scanned = self._scan()
        return [process for process in self._scanned if serves(process.argv)]

    def _scan(self) -> list[Process]:
        found = []
        alive = set()
        for pid in self._pids():
            stat = self.stat(pid)
            if stat is None:
                continue
            alive.add(pid)
            comm, state, ppid, start, session = stat
            seen = self._servers.get(pid)
            same = seen is not None and seen[:2] == (start, comm)
            if seen is None or not same or not seen[2] or seen[3] < ARGV_LOOKS:
                seen = (start, comm, self._argv(pid, state), seen[3] + 1 if seen is not None and same else 1)
                self._servers[pid] = seen
            if seen[2]:
                found.append(Process(pid, start, comm, state, ppid, argv=seen[2], session=session))
        for pid in self._servers.keys() - alive:
            del self._servers[pid]
        return found

    def listening(self, pid: int) -> frozenset[int] | None:
        """TCP ports that *pid* listens on; None when we may not look, or it is in another network namespace."""
        try:
            if self._link(f"{pid}/ns/net") != self._link("self/ns/net"):
                return None
        except OSError:
            return None
        sockets = self._sockets(pid)
        if sockets is None:
            return None
        return frozenset(int(local.rpartition(b":")[2], 16) for state, local, _ in sockets if state == b"0A")

    def remote(self, pid: int) -> bool | None:
        """Whether *pid* has an established TCP connection to another host; None when we may not look."""
        sockets = self._sockets(pid)
        if sockets is None:
            return None
        for state, local, peer in sockets:
            here, there = local.rpartition(b":")[0], peer.rpartition(b":")[0]
            if state == b"01" and here != there and not _loopback(there):
                return True
        return False

    def _sockets(self, pid: int) -> list[tuple[bytes, bytes, bytes]] | None:
        """(state, local, peer) of the TCP sockets that *pid* has open, as /proc/net spells them."""
        try:
            names = self._list(f"{pid}/fd")
        except OSError:
            return None
        inodes = set()
        for name in names:
            try:
                target = self._link(f"{pid}/fd/{name}")
            except PermissionError:
                return None  # the list may be open to us while what it names is not
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1].encode())
        return [entry[1:] for entry in self._tcp(pid) if entry[0] in inodes] if inodes else []

    def _tcp(self, pid: int) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """(inode, state, local, peer) of the TCP sockets in *pid*'s network namespace, read once a pass.

        A busy server has tens of thousands of connections, and every process of the host shares its table.
        """
        try:
            namespace = self._link(f"{pid}/ns/net")
        except OSError:
            namespace = f"of {pid}"
        if namespace not in self._tables:
            found = []
            for table in ("tcp", "tcp6"):
                for line in (self._bytes(f"{pid}/net/{table}") or b"").splitlines()[1:]:
                    columns = line.split(None, 10)
                    if len(columns) > 9 and columns[3] in (b"0A", b"01"):
                        found.append((columns[9], columns[3], columns[1], columns[2]))
            self._tables[namespace] = found
        return self._tables[namespace]

    def _identify(self, process: Process) -> Process:
        pid = process.pid
        user, init = "", False
        for line in (self._bytes(f"{pid}/status") or b"").splitlines():
            if line.startswith(b"Uid:"):
                user = self._user(int(line.split()[1]))
            elif line.startswith(b"NSpid:"):
                init = line.split()[-1] == b"1"
        argv = self._argv(pid, process.state)
        return replace(process, user=user, cgroup=self._cgroups(pid)[0], argv=argv, init=init)

    def _cgroups(self, pid: int) -> tuple[str, str, str]:
        """(cgroup path, freezer file, memory folder) of *pid*, the latter below the cgroup root.

        v2 where it says something, else v1; memory is accounted where its controller is.
        """
        unified = memory = freezer = ""
        for entry in (self._bytes(f"{pid}/cgroup") or b"").decode(errors="replace").splitlines():
            number, _, rest = entry.partition(":")
            controllers, _, own = rest.partition(":")
            if number == "0":
                unified = own
            if "memory" in controllers.split(","):
                memory = own
            if "freezer" in controllers.split(",") and own not in ("", "/"):
                freezer = f"freezer{own}/freezer.state"
        if unified not in ("", "/"):
            freezer = f"{unified.lstrip('/')}/cgroup.events"
        path = unified if unified not in ("", "/") else memory or unified
        return path, freezer, f"memory{memory}" if memory else unified

    def _argv(self, pid: int, state: str) -> tuple[str, ...]:
        """The command line, or nothing when a thread of the process may hold the lock that reading it takes."""
        if state in "DZX" or self._any_thread_waits(pid):
            return ()
        text = (self._bytes(f"{pid}/cmdline") or b"")[:ARGV_BYTES]
        return tuple(part.decode(errors="replace") for part in text.rstrip(b"\0 ").split(b"\0")) if text else ()

    def _any_thread_waits(self, pid: int) -> bool:
        try:
            tasks = self._list(f"{pid}/task")
        except OSError:
            return False
        states = (self.stat(f"{pid}/task/{task}") for task in tasks[:THREADS])
        return any(stat is not None and stat[1] == "D" for stat in states)

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


def _loopback(address: bytes) -> bool:
    """Whether an address of /proc/net (little endian words) is 127.x.y.z, that mapped into IPv6, or ::1."""
    if len(address) == 8 or address.startswith(b"0000000000000000FFFF0000"):
        return address.endswith(b"7F")
    return address == b"00000000000000000000000001000000"
