"""The configuration file: one bad file per error, with the exact message; every problem at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_oom_exporter.config import Config, ConfigError, parse_yaml

GOOD = """
engines:
  - name: chat
    url: http://127.0.0.1:8000/
    period_seconds: 2
nvml:
  period_seconds: 0.5
"""


def test_a_good_file() -> None:
    """A YAML list is a tuple, a whole number is a number of seconds, and everything else has its default."""
    config = parse_yaml(GOOD)
    assert config.engines[0].url == "http://127.0.0.1:8000"
    assert config.engines[0].period_seconds == 2.0
    assert config.nvml.period_seconds == 0.5
    assert config.limits == Config().limits


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file(text: str) -> None:
    """Nothing to say is allowed."""
    assert parse_yaml(text) == Config()


ENGINE = "engines: [{name: a, url: %s}]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "must be a mapping of settings, not list"),
        ("hello", "must be a mapping of settings, not str"),
        ("a: b: c", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("a: [", "line 1, column 5: not valid YAML: expected the node content, but found '<stream end>'"),
        ("nvml: {}\nnvml: {}", "line 2, column 1: not valid YAML: the key 'nvml' is there twice"),
        ("a: !!python/object:os.system x", "line 1, column 4: not valid YAML: could not determine a constructor for the "
         "tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: &x [1]\nb: *x", "line 2, column 4: not valid YAML: aliases are not supported; write it out"),
        ("engines: &a [*a]", "line 1, column 14: not valid YAML: aliases are not supported; write it out"),
        ("engines: [{2020-01-01: x}]", "cannot be used: keys must be str, int, float, bool or None, not datetime.date"),
        ("1: 2", "1: a setting's name must be text"),
        ("engine: []", "engine: there is no such setting"),
        ("nvml: {period: 1}", "nvml.period: there is no such setting"),
        ("nvml: {period_seconds: fast}", "nvml.period_seconds: input should be a valid number, not 'fast'"),
        ('nvml: {period_seconds: "1"}', "nvml.period_seconds: input should be a valid number, not '1'"),
        ("nvml: {period_seconds: -1}", "nvml.period_seconds: input should be greater than or equal to 0.1, not -1"),
        ("nvml: {period_seconds: 0}", "nvml.period_seconds: input should be greater than or equal to 0.1, not 0"),
        ("nvml: {period_seconds: .inf}", "nvml.period_seconds: input should be a finite number, not inf"),
        ("nvml: {enabled: yes please}", "nvml.enabled: input should be a valid boolean, not 'yes please'"),
        ("nvml: 3", "nvml: input should be an object, not 3"),
        ("engines: {}", "engines: input should be a valid array, not {}"),
        ("engines: [{url: 'http://h'}]", "engines.0.name: is required"),
        ("engines: [{name: a}]", "engines.0.url: is required"),
        (ENGINE % "h:8000", "engines.0.url: must start with http:// or https://"),
        (ENGINE % "'http://'", "engines.0.url: has no host"),
        (ENGINE % "'http://u:p@h'", "engines.0.url: must not hold a user or password; use bearer_token_file"),
        (ENGINE % "'http://h?a=1'", "engines.0.url: must not have a query or fragment"),
        (ENGINE % "'http://h:99999'", "engines.0.url: Port out of range 0-65535"),
        ("engines: [{name: a, url: 'http://h', kind: ollama3}]", "engines.0.kind: input should be 'vllm', not 'ollama3'"),
        ("engines: [{name: '', url: 'http://h'}]", "engines.0.name: string should have at least 1 character, not ''"),
        ("engines: [{name: a, url: 'http://h'}, {name: a, url: 'http://i'}]", "engines.1.name: 'a' is the name of "
         "engines.0"),
        ("limits: {series: 3}", "limits.series: input should be greater than or equal to 100, not 3"),
        ("processes: {floor_bytes: 2.5}", "processes.floor_bytes: input should be a valid integer, not 2.5"),
        ("engines: [{name: a, url: 2026-12-01}]", "engines.0.url: must start with http:// or https://"),
    ],
)  # fmt: skip
def test_bad_files(text: str, problem: str) -> None:
    """One file, one sentence."""
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text)
    assert caught.value.problems == [problem]


def test_a_bomb_of_aliases() -> None:
    """Nine lines that would make gigabytes are refused at the first alias."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="aliases are not supported"):
        parse_yaml("\n".join(lines))


def test_every_problem_at_once() -> None:
    """Nobody should have to start the daemon three times to find three mistakes."""
    with pytest.raises(ConfigError) as caught:
        parse_yaml("nvml: {period_seconds: -1, enabled: 3}\nengines: [{name: a}]\nfoo: 1")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "engines.0.url",
        "nvml.enabled",
        "nvml.period_seconds",
        "foo",
    ]


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    """Whatever is in the file, the answer is a configuration or a list of sentences."""
    problems = ["none"]
    try:
        parse_yaml(text)
    except ConfigError as err:
        problems = err.problems
    assert problems
    assert all(problem and "\n" not in problem for problem in problems)
