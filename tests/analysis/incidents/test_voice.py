"""Whose words are they? Quoted text, advice, code and levels against the program's own, in many loggers' layouts."""

from __future__ import annotations

import json

import pytest

from tests.analysis.incidents.test_folding import categories, oom
from tests.eval_incidents import classify

E = "RuntimeError: CUDA error: out of memory"


@pytest.mark.parametrize(
    "lines",
    [
        # multi-line prompts and answers of loggers that do not escape line ends
        f"INFO 07-15 10:00:01 [logger.py:43] Received request c-1: prompt: '<|im_start|>user\n{oom()}\n<|im_end|>', params: SamplingParams(n=1)",
        "INFO 07-15 10:00:01 [logger.py:43] Received request c-1: prompt: 'why?\nTraceback (most recent call last):\n"
        f'  File "/a/b.py", line 3, in execute_model\n    x()\n{oom()}\n\', params: SamplingParams(n=1)',
        f"[2025-04-11 09:20:41] Receive: obj=GenerateReqInput(rid='a', text='please explain\n{E}\n', sampling_params=1)",
        f"INFO 07-15 10:00:03 [logger.py:71] Generated response c-1: output: 'You likely saw\n{E}\nwhich means', finish_reason: stop",
        # levels of other loggers
        "2026-01-01 10:00:00.000 | INFO     | app:chat:12 - CUDA error: out of memory",
        "2026-01-01 10:00:00.000 | DEBUG    | app:main:12 - CUDA error: out of memory",
        "2026-01-01 10:00:00,123 - app - INFO - handled: CUDA error: out of memory, retrying",
        "2026-01-01T10:00:00Z [info     ] handled                        err=CUDA error: out of memory",
        'ts=2026-01-01T10:00:00Z caller=x.go:1 level=info msg="CUDA error: out of memory"',
        "vllm-0 vllm INFO 01-01 00:00:00 [x.py:1] fallback after CUDA error: out of memory, ok",
        # JSON of gateways
        '{"level":"info","msg":"chat: RuntimeError: CUDA error: out of memory"}',
        'gw-0 gw {"level":"info","msg":"chat: RuntimeError: CUDA error: out of memory"}',
        '0|gw     | {"level":"info","msg":"RuntimeError: CUDA error: out of memory"}',
        'Jan 01 10:00:00.123456 host gw[7]: {"level":"info","msg":"chat: RuntimeError: CUDA error: out of memory"}',
        # changelogs, docs, rules, help, shells, tests
        "* Fix CUDA error: an illegal memory access was encountered in flash attention (#4321)",
        "a1b2c3d [Bugfix] Fix CUDA error: an illegal memory access was encountered (#4321)",
        "## RuntimeError: CUDA error: out of memory",
        "  - CUDA error: out of memory",
        "  --oom-pattern TEXT  default: CUDA error: out of memory",
        "    Regex  log  ^.*CUDA error: out of memory.*$",
        "OOM_MARKER=CUDA error: out of memory",
        "      summary: No available memory for the cache blocks on {{ $labels.instance }}",
        "catch throw std::bad_alloc",
        "$ grep 'CUDA error: out of memory' server.log",
        "test_oom (t.T) CUDA error: out of memory ok",
        # failures that a program got over
        "W0715 10:00:01.000000 139 torch/_inductor/select_algorithm.py:1234] [0/0] Runtime error during autotuning: out of resource: shared "
        "memory, Required: 147456, Hardware limit: 101376. Ignoring this choice.",
        "WARNING 10-25 13:08:43 [x.py:1] CUDA out of memory. Tried to allocate 2.00 GiB. Retrying after empty_cache",
    ],
)
def test_nothing(lines: str) -> None:
    """None of these is an incident."""
    assert categories(lines) == []


@pytest.mark.parametrize(
    "lead",
    [
        "Error while embedding inputs: ", "Failed to process prompt: ", "Error processing response: ", "ERROR in generate completion: ",
        "Prompt execution failed: ", "2026-01-01 10:00:00,123 - test_server - ERROR - ", "ERROR request user=alice failed: ",
        "ERROR embed failed input=3 items: ", 'level=error msg=failed query=12ms err="', "[ERROR] task title=nightly: ",
        "ERROR computing prompt logprobs: ", 'ERROR: "POST /generate" failed: ', "echo-server ERROR ", "ERROR workers' failure: ",
        "Engine step failed; the request could fail: ", "what():  ", "E       ", "ERROR:root:", "[rank3]: ", "",
        "2026-01-01 10:00:00.000 | ERROR    | app:main:12 - ", "Exception in thread Thread-1: ", "openai.InternalServerError: Error code: 500 - {'error': {'message': '",
    ],
)  # fmt: skip
def test_own_words(lead: str) -> None:
    """A program that names what it failed on still speaks for itself."""
    assert categories(lead + E) == ["cuda_oom_generic"]


@pytest.mark.parametrize(
    "record",
    [
        {"date": 1700000000.1, "log": E, "kubernetes": {"pod_name": "vllm-0"}},
        {"labels": {"app": "vllm"}, "line": E, "timestamp": "2026-01-01T00:00:00Z"},
        {"textPayload": E, "severity": "ERROR", "resource": {"type": "k8s_container"}},
        {"jsonPayload": {"message": E, "level": "error"}, "severity": "ERROR"},
        {"file": "/var/log/x", "message": E, "source_type": "file"},
        {"version": "1.1", "host": "gpu1", "short_message": E, "level": 3},
        {"name": "vllm", "pid": 7, "level": 50, "msg": E, "v": 0},
        {"level": 40, "levelname": "ERROR", "message": E},
        {"@timestamp": "x", "log.level": "error", "message": "boom", "error.message": E},
        {"@timestamp": "x", "log": {"level": "error"}, "message": E},
        {"timestamp": "2023", "level": "ERROR", "fields": {"message": E}, "target": "text_generation_client"},
        {"level": "error", "ts": 1, "msg": "llm call failed", "stacktrace": f"a\n{E}"},
        {"level": "panic", "msg": E},
        {"object": "error", "message": E, "type": "InternalServerError", "code": 500},
        {"error": {"message": E}},
    ],
    ids=lambda record: ",".join(record),
)
def test_structured(record: dict[str, object]) -> None:
    """Records of shippers hold the program's line; in structured lines the level decides."""
    assert categories(json.dumps(record)) == ["cuda_oom_generic"]


VIEWERS = (
    "Jan 01 10:00:00.123456 host vllm[77]: {}", "[  123.456789] host vllm[77]: {}", "Thu 2026-01-01 10:00:00 CET host vllm[77]: {}",
    "<30>1 2026-01-01T10:00:00.123Z host vllm 77 - - {}", "2026-01-01T10:00:00.123456+01:00 host vllm[77]: {}", "vllm-0 vllm {}", "[vllm-0] {}",
    "0|vllm     | {}", " 0: {}", "12: {}", "    MESSAGE={}", "kern  :err   : {}",
)  # fmt: skip


@pytest.mark.parametrize("viewer", VIEWERS)
def test_viewers(viewer: str) -> None:
    """Through every viewer two ranks are two incidents, each with its PID and the phase of its traceback."""
    lines = []
    for pid in (100, 101):
        prefix = f"(Worker_TP{pid - 100} pid={pid}) ERROR 10-25 13:08:43 [m.py:1] "
        said = ("Traceback (most recent call last):", '  File "/v/worker.py", line 1, in load_model', "    x()", oom())
        lines += [viewer.format(prefix + text) for text in said]
    found = classify("\n".join(lines).encode())
    assert [(i.category, i.fields["pid"]) for i in found] == [
        ("cuda_oom_weights_load", 100),
        ("cuda_oom_weights_load", 101),
    ]


@pytest.mark.parametrize("viewer", VIEWERS[:4])
def test_journal_layouts(viewer: str) -> None:
    """A line that must begin with its message is found in all of journald's layouts."""
    killed = viewer.format("Killed /user.slice/x.scope due to memory pressure for /user.slice being 51.07% > 50.00%")
    assert categories(killed.replace("vllm", "systemd-oomd")) == ["host_oom_kill_userspace"]


def test_quotation_ends() -> None:
    """What comes after a quoted prompt is the program's again, however many lines and quotes the prompt had."""
    for prompt in (
        "'line one\nline two', params: SamplingParams(n=1)",
        "'a 24\" screen', params: SamplingParams(n=1)",
        "'it''s', params: S(n=1)",
    ):
        text = (
            f"INFO 07-15 10:00:01 [logger.py:43] Received request c: prompt: {prompt}\nProcess SpawnProcess-1:\n{oom()}"
        )
        assert categories(text) == ["cuda_oom_generic"], prompt


@pytest.mark.parametrize(
    "line",
    [
        f"ERROR {E}, retrying in 5s (attempt 10/10)", f"ERROR {oom()} Falling back to CPU failed, exiting", f"ERROR: could not fix allocation: {E}",
        f"ERROR fixed size pool exhausted: {E}", f"ERROR regex: guided decoding failed: {E}", f"[ERROR] - {E}",
    ],
)  # fmt: skip
def test_loud(line: str) -> None:
    """At level ERROR a failure counts, whatever words stand beside it."""
    assert categories(line) == ["cuda_oom_generic"]


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-01T00:00:00Z DEBUG hyper::proto::h1: body CUDA error: out of memory", f"2026-01-01T00:00:00Z  INFO my_gateway::chat: said {E}",
        '{"agent":"support-bot","message":"CUDA error: out of memory","user":"bob"}', '{"log":"CUDA error: out of memory","date":"2026","room":"help"}',
        '{"jsonPayload":{"message":"CUDA error: out of memory","level":"info"},"severity":"INFO"}',
        '{"message":"CUDA error: out of memory","agent":{"type":"filebeat"},"log":{"level":"info"}}',
        f"gateway user: my server failed with {E}", "ERROR 01-01 00:00:00 [x.py:1] invalid request, prompt: 'CUDA error: out of memory'",
        '{"level":"warn","msg":"moderation: prompt: CUDA error: out of memory"}',
    ],
)  # fmt: skip
def test_still_nothing(line: str) -> None:
    """Levels of relays' look-alikes, records of chat programs, words of failure inside somebody's text."""
    assert categories(line) == []


def test_quoted_consequences() -> None:
    """A quoted death, retry or version banner is none either."""
    lead = "INFO 07-15 10:00:01 [logger.py:43] Received request c: prompt: 'look:\n"
    assert categories(lead + "vllm.v1.engine.exceptions.EngineDeadError: x\nwhat now?', params: S(n=1)") == []
    first = f"(EngineCore pid=7) {oom()}"
    assert categories(first, lead + "build: 5172 (eb1776b1) with cc\n', params: S(n=1)", first) == ["cuda_oom_generic"]
