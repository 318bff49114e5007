"""`release PID`: print the plan and the evidence; act only with --yes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pwd
import sys

from gpu_oom_exporter.act.release import Changed, Outcome, carry_out
from gpu_oom_exporter.analysis.releasing import Plan, Question, plan
from gpu_oom_exporter.cli import OK, PROBLEM, Misuse, load_config, logs, paths
from gpu_oom_exporter.cli.holders import Look, size
from gpu_oom_exporter.daemon import this_host
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

CONFIRM_SECONDS = 2.0


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, and act if told to; exit 1 when refused, changed, or nothing was freed."""
    chosen = vars(arguments)
    config = load_config(chosen["config.file"])
    if arguments.pid < 1:
        raise Misuse(f"PID: {arguments.pid} is not a process ID")
    grace = chosen["grace_seconds"]
    if not 0 <= grace <= 3600:
        raise Misuse(f"--grace-seconds: {grace:g} is not between 0 and 3600")
    logs.set_up("error", chosen["log.format"])
    where = paths(arguments)
    proc = ProcReader(where.procfs, fresh_seconds=0.0, cgroupfs=f"{where.sysfs}/fs/cgroup")
    look = Look(this_host(config, where), config, CONFIRM_SECONDS)
    return asyncio.run(_release(arguments, look, proc, grace))


async def _release(arguments: argparse.Namespace, look: Look, proc: ProcReader, grace: float) -> int:
    try:
        await look.once()
        await asyncio.sleep(CONFIRM_SECONDS)
        report = await look.once()
        nvml = look.state.nvml
        if report is None or nvml is None:
            health = report.health.get("nvml") if report is not None else None
            _say(arguments, f"No GPU can be read: {health.detail if health else 'none was found'}.")
            return _end(arguments, None, False, None)
        question = Question(
            arguments.pid,
            nvml,
            report,
            look.board.snapshot().containers,
            _own_line(proc),
            _user(),
            os.geteuid() == 0,
            arguments.force,
        )
        made = plan(question, grace)
        if made.refusal:
            _say(arguments, f"Refused: {made.refusal}.")
            return _end(arguments, made, False, None)
        _show(arguments, made)
        if not arguments.yes:
            _say(arguments, "Nothing was done. Add --yes to do it.")
            return _end(arguments, made, False, None, status=OK)
        try:
            outcome = await carry_out(made, look.once, proc, grace)
        except Changed as err:
            _say(arguments, f"Stopped: {err}.")
            return _end(arguments, made, False, None)
        except PermissionError:
            _say(arguments, f"Refused by the kernel: no permission to signal PID {made.target}; run as root.")
            return _end(arguments, made, False, None)
        return _report(arguments, made, outcome)
    finally:
        await look.close()


def _show(arguments: argparse.Namespace, made: Plan) -> None:
    if arguments.output == "json":
        return
    print(f"PID {made.pid} holds {size(made.used_bytes)} of GPU {', '.join(place.gpu for place in made.places)}.")
    for line in made.evidence:
        print(f"  {line}")
    print("Plan:")
    for number, step in enumerate(made.steps, 1):
        print(f"  {number}. {step}")


def _report(arguments: argparse.Namespace, made: Plan, outcome: Outcome) -> int:
    if arguments.output != "json":
        for line in outcome.log:
            print(line)
        print(f"Freed {size(outcome.freed_bytes)}.")
    if not outcome.ended:
        _say(arguments, f"PID {made.target} did not end: it is stuck in the kernel. Drain the node and reboot it.")
    done = outcome.ended and bool(outcome.freed_bytes)
    return _end(arguments, made, outcome.ended, outcome.freed_bytes, status=OK if done else PROBLEM)


def _end(arguments: argparse.Namespace, made: Plan | None, done: bool, freed: int | None, status: int = PROBLEM) -> int:
    if arguments.output == "json":
        steps = list(made.steps) if made is not None else []
        answer = {"pid": arguments.pid, "plan": steps, "done": done, "freed_bytes": freed}
        if made is not None and made.refusal:
            answer["refusal"] = made.refusal
        print(json.dumps(answer))
    return status


def _say(arguments: argparse.Namespace, sentence: str) -> None:
    print(sentence, file=sys.stderr if arguments.output == "json" else sys.stdout)


def _own_line(proc: ProcReader) -> frozenset[int]:
    """This process and its ancestors."""
    found = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = proc.stat(pid)
        pid = stat[2] if stat is not None else 0
    return frozenset(found)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
