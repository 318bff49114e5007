"""Frozen settings with defaults and help; strict, and every problem is reported at once with its dotted path.

*What to watch* is in the file that `parse` understands; *how to run* is in the flags of `cli`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Seconds = Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]


class ConfigError(Exception):
    """The configuration cannot be used; `problems` has one sentence each, with its dotted path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Engine(Section):
    """An inference server to watch."""

    name: str = Field(
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]*$",
        description="Our name for it, the `engine` label: stable over restarts, never a PID or pod hash.",
    )
    url: str = Field(description="Address of the API server, for example `http://127.0.0.1:8000`.")
    kind: Literal["vllm"] = Field("vllm", description="Which engine it is.")
    period_seconds: Seconds = Field(
        5.0,
        description="Seconds between polls; doubled while an answer takes over 100 ms or the engine loads.",
    )
    timeout_seconds: Seconds = Field(4.0, description="A poll that takes longer has failed.")
    bearer_token_file: str | None = Field(
        None, description="File with the API key; it is sent to this URL only and read at every poll."
    )

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError("must start with http:// or https://")
        if not parts.hostname:
            raise ValueError("has no host")
        if parts.port == 0:
            raise ValueError("has port 0")
        if parts.username or parts.password:
            raise ValueError("must not hold a user or password; use bearer_token_file")
        if parts.query or parts.fragment:
            raise ValueError("must not have a query or fragment")
        return url.rstrip("/")


class Nvml(Section):
    """How the NVIDIA driver is read."""

    enabled: bool = Field(True, description="Off on a host whose GPUs are none of our business.")
    period_seconds: Seconds = Field(1.0, description="Seconds between readings.")
    deadline_seconds: Seconds = Field(8.0, description="A reading that takes longer is `stuck`.")


class Processes(Section):
    """Which processes get a series of their own, and which may do what others may not."""

    floor_bytes: int = Field(
        256 * 1024 * 1024, ge=0, description="A command below this has no `gpu_oom_process_vram_bytes`."
    )
    show_pid: bool = Field(
        False, description="One series per process, with its PID, instead of one per command (`--collect.process-pid`)."
    )
    idle_allow: tuple[str, ...] = Field(
        (), description="Commands that may hold memory idle for hours, as shell patterns, for example `jupyter*`."
    )
    cotenant_allow: tuple[str, ...] = Field(
        (), description="Commands that may join a serving GPU without being a newcomer, as shell patterns."
    )


class LogFile(Section):
    """A log file, or a pattern of several."""

    path: str = Field(min_length=1, description="File or shell pattern, for example `/var/log/vllm/*.log`.")
    engine: str = Field("", max_length=64, description="Name of the engine that writes it, as under `engines`.")

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/"):
            raise ValueError("must begin with /")
        return path


class Logs(Section):
    """Which logs are watched for incidents."""

    enabled: bool = Field(True, description="Off where logs are watched elsewhere; there are no incidents then.")
    files: tuple[LogFile, ...] = Field((), description="Log files besides those of containers and the kernel.")
    kernel: bool = Field(True, description="The kernel's messages: OOM killer, Xid, driver. Needs root.")
    journal: bool = Field(
        True, description="systemd's journal, where it is and the extra `journal` is installed: units and the kernel."
    )
    containers: bool = Field(True, description="The logs that Docker and the kubelet keep on this host.")


class Limits(Section):
    """Bounds that keep a broken host from flooding Prometheus."""

    series: int = Field(5000, ge=100, le=1_000_000, description="Series on the page; more are dropped and counted.")


class Config(Section):
    """The whole file."""

    engines: tuple[Engine, ...] = Field((), description="Inference servers to watch.")
    nvml: Nvml = Field(Nvml(), description="How the NVIDIA driver is read.")
    processes: Processes = Field(Processes(), description="Which processes get a series of their own.")
    logs: Logs = Field(Logs(), description="Which logs are watched for incidents.")
    limits: Limits = Field(Limits(), description="Bounds.")

    @model_validator(mode="after")
    def _distinct(self) -> Config:
        seen: dict[str, int] = {}
        problems = []
        for number, engine in enumerate(self.engines):
            if engine.name in seen:
                problems.append(f"engines.{number}.name: {engine.name!r} is the name of engines.{seen[engine.name]}")
            seen.setdefault(engine.name, number)
        for number, file in enumerate(self.logs.files):
            if file.engine and file.engine not in seen:
                problems.append(f"logs.files.{number}.engine: {file.engine!r} is not the name of an engine")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses aliases, and a key given twice: YAML's rule is that the last one silently wins."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of them make gigabytes
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not supported; write it out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, Hashable) else str(key))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Config:
    """The configuration in *text*, or `ConfigError`."""
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([f"{where}not valid YAML: {err.problem or err}"]) from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        raise ConfigError([f"not valid YAML: {' '.join(str(err).split())}"]) from err
    if loaded is None:
        return Config()
    if not isinstance(loaded, Mapping):
        raise ConfigError([f"must be a mapping of settings, not {type(loaded).__name__}"])
    return parse(loaded)


def parse(mapping: Mapping[Any, Any]) -> Config:
    """The configuration in *mapping*, or `ConfigError` with every problem."""
    wrong = [str(key) for key in mapping if not isinstance(key, str)]
    if wrong:
        raise ConfigError([f"{key}: a setting's name must be text" for key in wrong])
    try:
        # through JSON, so that a YAML list is a tuple while "5" stays no number
        return Config.model_validate_json(json.dumps(mapping, default=str))
    except (ValueError, TypeError, RecursionError) as err:
        if not isinstance(err, ValidationError):  # a key that is a date, a nest without end
            raise ConfigError([f"cannot be used: {' '.join(str(err).split())}"]) from err
        sentences = [_sentence(problem) for problem in err.errors(include_url=False)]
        raise ConfigError([line for sentence in sentences for line in sentence.splitlines()]) from err


WORDS = {"extra_forbidden": "there is no such setting", "missing": "is required"}


def _sentence(problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    text = WORDS.get(problem["type"]) or re.sub(r"^Value error, ", "", problem["msg"])
    if problem["type"] not in (*WORDS, "value_error"):
        text = text[0].lower() + text[1:] + f", not {problem['input']!r}"
    return f"{path}: {text}" if path else text
