"""The command line: one small module per command; the only place that prints."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from gpu_oom_exporter import __version__
from gpu_oom_exporter.config import Config, ConfigError, parse_yaml
from gpu_oom_exporter.daemon import Paths

PROG = "gpu-oom-exporter"
OK, PROBLEM, MISUSE = 0, 1, 2
ENVIRONMENT = "GPU_OOM_EXPORTER_"


class Misuse(Exception):
    """The command line or a file it names cannot be used; printed, exit 2."""


def build_parser(environment: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Every command and flag. Each flag's default can be set by its mirror in *environment*."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Tells you that GPU memory will run out before it does, and who holds it.",
        epilog="Without a command: serve. Exit status: 0 all well, 1 a problem was found, 2 misuse.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon", allow_abbrev=False)
    _demo(serve)
    _config(serve)
    serve.add_argument("--config.check", action="store_true", help="check the configuration file and exit")
    serve.add_argument(
        "--web.listen-address",
        action="append",
        metavar="HOST:PORT",
        help="where to serve; may be given more than once (default 127.0.0.1:10140)",
    )
    serve.add_argument("--web.telemetry-path", default="/metrics", metavar="PATH", help="where the metrics are")
    serve.add_argument(
        "--collect.process-pid", action="store_true", help="one series per process with its PID, instead of per command"
    )
    _paths(serve)
    _logging(serve)

    snapshot = commands.add_parser(
        "snapshot", help="read everything once and print it, with names masked", allow_abbrev=False
    )
    _demo(snapshot)
    _config(snapshot)
    _paths(snapshot)
    _logging(snapshot)
    snapshot.add_argument("--output", choices=("text", "json"), default="text", help="format of the result")

    holders = commands.add_parser("holders", help="who holds the memory of each GPU", allow_abbrev=False)
    _demo(holders)
    _config(holders)
    _paths(holders)
    _logging(holders)
    holders.add_argument("--gpu", metavar="ID", help="one GPU only: its index, UUID or PCI address")
    holders.add_argument(
        "--confirm-seconds",
        type=float,
        default=2.0,
        metavar="N",
        help="read twice, this long apart; a suspicion must be there both times",
    )
    holders.add_argument("--watch", action="store_true", help="go on, with the growth of each holder; Ctrl-C ends it")
    holders.add_argument("--output", choices=("text", "json"), default="text", help="format of the result")

    release = commands.add_parser(
        "release", help="free what one PID holds, safely: print the plan, act only with --yes", allow_abbrev=False
    )
    release.add_argument("pid", type=int, metavar="PID", help="the process whose memory is to be freed")
    release.add_argument("--yes", action="store_true", help="carry the plan out")
    release.add_argument("--force", action="store_true", help="also when it is part of a living engine")
    release.add_argument(
        "--grace-seconds", type=float, default=20.0, metavar="N", help="how long SIGTERM has before SIGKILL"
    )
    _config(release)
    _paths(release)
    _logging(release)
    release.add_argument("--output", choices=("text", "json"), default="text", help="format of the result")

    explain = commands.add_parser("explain", help="what does this log say happened, and what to do", allow_abbrev=False)
    explain.add_argument(
        "file", nargs="*", metavar="FILE", help="log files, also gzip, xz or bzip2; - is standard input"
    )
    explain.add_argument(
        "--format",
        choices=("auto", "plain", "docker-json", "cri", "journal", "kernel"),
        default="auto",
        help="how the log is wrapped; auto looks at every line",
    )
    explain.add_argument(
        "--version-hint", metavar="V", help="the engine's version, for remedies, where the log does not tell it"
    )
    explain.add_argument("--output", choices=("text", "json"), default="text", help="format of the result")

    generate = commands.add_parser(
        "generate", help="write the files that follow from the catalogues", allow_abbrev=False
    )
    generate.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    generate.add_argument("--out", default=".", metavar="DIR", help="root of the repository")

    for command in commands.choices.values():
        _mirror(command, environment or {})
    return parser


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--demo", action="store_true", help="on a simulated host: no GPU, no root, nothing installed")
    parser.add_argument(
        "--demo.speed",
        type=float,
        default=1.0,
        metavar="N",
        help="let the simulated host's time run N times as fast",
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config.file", metavar="FILE", help="what to watch; see docs/configuration.md")


def _paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path.procfs", default="/proc", metavar="DIR", help="where /proc of the host is")
    parser.add_argument("--path.sysfs", default="/sys", metavar="DIR", help="where /sys of the host is")
    parser.add_argument(
        "--path.docker-socket", default="/var/run/docker.sock", metavar="FILE", help="Docker's API, for container names"
    )
    parser.add_argument(
        "--path.container-logs",
        default="/var/log/containers",
        metavar="DIR",
        help="the kubelet's log links, for names of pods",
    )
    parser.add_argument(
        "--path.docker-logs", default="/var/lib/docker/containers", metavar="DIR", help="where Docker keeps its logs"
    )
    parser.add_argument(
        "--path.pod-logs", default="/var/log/pods", metavar="DIR", help="where the kubelet keeps the logs of pods"
    )
    parser.add_argument(
        "--path.journal",
        action="append",
        metavar="DIR",
        help="where the journal is; the first that exists (default /var/log/journal, then /run/log/journal)",
    )
    parser.add_argument("--path.kmsg", default="/dev/kmsg", metavar="FILE", help="the kernel's messages")
    parser.add_argument(
        "--storage.path",
        metavar="DIR",
        help="what must survive a restart (default: systemd's state directory, /var/lib/gpu-oom-exporter for root, "
        "else ~/.local/state/gpu-oom-exporter)",
    )


def _logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log.level", choices=("debug", "info", "warning", "error"), default="info", help="log from here on"
    )
    parser.add_argument("--log.format", choices=("logfmt", "json"), default="logfmt", help="form of the log lines")


def mirror_name(flag: str) -> str:
    """The environment variable that mirrors *flag*."""
    return ENVIRONMENT + re.sub(r"[^A-Z0-9]+", "_", flag.lstrip("-").upper())


def _mirror(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    for action in parser._actions:
        flag = next((o for o in action.option_strings if o.startswith("--")), None)
        text = environment.get(mirror_name(flag)) if flag and flag != "--help" else None
        if text is None:
            continue
        if isinstance(action, argparse._StoreTrueAction):
            action.default = text.lower() in ("1", "true", "yes")
        elif isinstance(action, argparse._AppendAction):
            action.default = [part for part in re.split(r"[,\s]+", text) if part]
        else:
            if action.choices is not None and text not in action.choices:
                raise Misuse(f"{mirror_name(flag or '')}: {text!r} is not one of {', '.join(action.choices)}")
            action.default = text  # argparse converts a text default as it converts an argument


def load_config(path: str | None) -> Config:
    """The configuration in the file *path*, or the defaults."""
    if path is None:
        return Config()
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as err:
        detail = err.strerror if isinstance(err, OSError) and err.strerror else "is not UTF-8 text"
        raise Misuse(f"{path}: {detail}") from err
    try:
        return parse_yaml(text)
    except ConfigError as err:
        raise Misuse("\n".join(f"{path}: {problem}" for problem in err.problems)) from err


def paths(arguments: argparse.Namespace) -> Paths:
    """The roots that *arguments* give, with the storage folder worked out."""
    chosen = vars(arguments)
    storage = chosen["storage.path"] or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if not storage:
        home = (
            "/var/lib"
            if os.geteuid() == 0
            else os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        )
        storage = f"{home}/gpu-oom-exporter"
    return Paths(
        chosen["path.procfs"],
        chosen["path.sysfs"],
        storage,
        chosen["path.docker_socket"],
        chosen["path.container_logs"],
        chosen["path.docker_logs"],
        chosen["path.pod_logs"],
        chosen["path.kmsg"],
        tuple(chosen["path.journal"] or ("/var/log/journal", "/run/log/journal")),
    )


def main(argv: Sequence[str]) -> int:
    """Run the command in *argv* and return its exit status."""
    if sys.stdout is None:  # started with standard output closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    try:
        arguments = build_parser(os.environ).parse_args(words)
        if vars(arguments).get("demo") and vars(arguments).get("config.file"):
            raise Misuse("--demo watches its own engines; leave out --config.file")
        if arguments.command == "serve":
            from gpu_oom_exporter.cli import serve

            return serve.run(arguments)
        if arguments.command == "snapshot":
            from gpu_oom_exporter.cli import snapshot

            return snapshot.run(arguments)
        if arguments.command == "holders":
            from gpu_oom_exporter.cli import holders

            return holders.run(arguments)
        if arguments.command == "release":
            from gpu_oom_exporter.cli import release

            return release.run(arguments)
        if arguments.command == "explain":
            from gpu_oom_exporter.cli import explain

            return explain.run(arguments)
        from gpu_oom_exporter.cli import generate

        return generate.run(arguments)
    except Misuse as err:
        for line in str(err).splitlines():
            print(f"{PROG}: {line}", file=sys.stderr)
        return MISUSE
    except SystemExit as err:  # argparse: 0 for --help, 2 for misuse
        return err.code if isinstance(err.code, int) else MISUSE


def main_and_exit() -> None:
    """The console script."""
    try:
        status = main(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `snapshot | head`
        _no_more_output()
        status = OK
    except OSError as err:  # a full disk behind standard output
        _no_more_output()
        print(f"{PROG}: standard output: {err.strerror or err}", file=sys.stderr)
        status = PROBLEM
    sys.exit(status)


def _no_more_output() -> None:
    """Let the interpreter's own flush at exit find a place."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
