"""`generate`: write, or check, every file that follows from the catalogues."""

from __future__ import annotations

import argparse
import os
import sys

from gpu_oom_exporter.cli import OK, PROBLEM, PROG, Misuse, build_parser, mirror_name
from gpu_oom_exporter.publish import artifacts


def files() -> dict[str, str]:
    """Path → content of every generated file."""
    return {
        "docs/cli.md": _cli_page(),
        "docs/configuration.md": artifacts.configuration_page(),
        "docs/incidents.md": artifacts.incidents_page(),
        "docs/metrics.md": artifacts.metrics_page(),
    }


def run(arguments: argparse.Namespace) -> int:
    """Write the files under --out; with --check, say which are out of date and exit 1."""
    stale = []
    for path, content in files().items():
        full = os.path.join(arguments.out, path)
        try:
            with open(full, encoding="utf-8") as file:
                current = file.read()
        except FileNotFoundError:
            current = ""
        except (OSError, ValueError) as err:
            raise Misuse(f"{full}: {err.strerror if isinstance(err, OSError) else 'is not UTF-8 text'}") from err
        if current == content:
            continue
        stale.append(path)
        if not arguments.check:
            try:
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w", encoding="utf-8") as file:
                    file.write(content)
            except OSError as err:
                raise Misuse(f"{full}: {err.strerror}") from err
    for path in stale:
        print(f"{path}: {'out of date' if arguments.check else 'written'}")
    if stale and arguments.check:
        print(f"run `{PROG} generate`", file=sys.stderr)
        return PROBLEM
    return OK


def _cli_page() -> str:
    lines = [
        artifacts.NOTICE,
        "# Command line",
        "",
        "`gpu-oom-exporter` without a command is `gpu-oom-exporter serve`.",
        "Exit status: 0 all well, 1 a problem was found, 2 misuse.",
        "Results go to standard output, logs to standard error.",
        "A flag's default can be set by the environment variable beside it.",
        "",
    ]
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    summaries = {choice.dest: choice.help for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        lines += [f"## {name}", "", f"{(summaries[name] or '').capitalize()}.", ""]
        lines += ["| flag | default | environment | meaning |", "| --- | --- | --- | --- |"]
        for action in command._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            if not action.option_strings:
                lines.append(f"| `{action.metavar}` | | | {action.help} |")
                continue
            flag = action.option_strings[0]
            shown = flag if action.nargs == 0 else f"{flag} {action.metavar or '|'.join(action.choices or ())}"
            shown = shown.replace("|", r"\|")
            default = "" if action.default in (None, False) else f"`{action.default}`"
            lines.append(f"| `{shown}` | {default} | `{mirror_name(flag)}` | {action.help} |")
        lines.append("")
    return "\n".join(lines)
