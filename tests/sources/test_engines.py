"""Engines: golden facts from captured vLLM pages, and servers that refuse, lie, flood and hang."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_oom_exporter import config
from gpu_oom_exporter.catalog.engines import DIALECTS, FIELDS, VLLM
from gpu_oom_exporter.model import Answer, EngineFacts
from gpu_oom_exporter.sources.board import SourceError
from gpu_oom_exporter.sources.engines import PAGE_BYTES, EngineSource, HttpFetch, launched, read_page
from gpu_oom_exporter.sources.procfs import Reader as ProcReader
from tests.conftest import HERE, ManualClock, as_json, golden, wait_until

CAPTURES = HERE / "captures" / "vllm"
PAGES = sorted(path.name for path in CAPTURES.glob("*.prom"))


@pytest.mark.parametrize("name", PAGES)
def test_golden_facts(name: str, update_golden: bool) -> None:
    """What each captured page tells, fact by fact. Read the expected file: it is the specification."""
    page = read_page((CAPTURES / name).read_bytes(), VLLM)
    told = dataclasses.asdict(page)
    golden(CAPTURES / name.replace(".prom", ".expected.json"), as_json(told), update_golden)


def rank(name: str, index: int = 0) -> dict[str, object]:
    return dataclasses.asdict(read_page((CAPTURES / name).read_bytes(), VLLM).ranks[index])


def test_both_usage_names_are_one_value() -> None:
    """0.9.2 to 0.10.2 export the old and the new name: never the sum."""
    assert rank("synthetic-0.10.2-v1-both-names.prom")["kv_used_ratio"] == 0.9642


def test_used_tokens_leave_out_the_null_block() -> None:
    """Usage is a share of blocks − 1: under load exactly 32 blocks of 128 tokens are held."""
    load = rank("0.32-load.prom")
    assert (load["kv_used_tokens"], load["kv_capacity_tokens"]) == (32 * 128, 16383 * 128)
    dp2 = rank("0.32-dp2-load.prom", 1)
    assert (dp2["rank"], dp2["kv_used_tokens"], dp2["kv_capacity_tokens"]) == ("1", 18 * 128, 63 * 128)


def test_idle_before_the_first_step() -> None:
    """With several API servers absent gauges mean idle."""
    idle = rank("0.32-multiapi-idle.prom")
    assert (idle["kv_used_ratio"], idle["running"], idle["waiting"]) == (0.0, 0, 0)


def test_stats_disabled() -> None:
    """--disable-log-stats leaves a Prometheus page without any vLLM family."""
    page = read_page((CAPTURES / "0.32-nostats.prom").read_bytes(), VLLM)
    assert (page.known, page.prometheus, page.ranks) == (False, True, ())


INFO = 'vllm:cache_config_info{block_size="16",engine="0",%s} 1.0\n'


@pytest.mark.parametrize(
    ("labels", "capacity", "used"),
    [
        ('num_gpu_blocks="101"', 1600, 800),
        ('num_gpu_blocks="None"', None, None),
        ('num_gpu_blocks="101",sliding_window="4096"', None, None),
        ('num_gpu_blocks="101",kv_cache_size_tokens="1616"', 1600, 800),
        ('num_gpu_blocks="101",kv_cache_size_tokens="808"', 808, None),  # hybrid: usage × capacity would be wrong
        ('num_gpu_blocks="1000",num_gpu_blocks_override="101"', 1600, 800),
        ('num_gpu_blocks="1"', None, None),
        ('num_gpu_blocks="nan"', None, None),
    ],
)
def test_pool_sizes(labels: str, capacity: int | None, used: int | None) -> None:
    """Capacity and used tokens, absent where they would be wrong."""
    page = INFO % labels + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    (got,) = read_page(page.encode(), VLLM).ranks
    assert (got.kv_capacity_tokens, got.kv_used_tokens) == (capacity, used)


def test_pool_bytes() -> None:
    """The flag's bytes are the pool's size, unless the count of blocks was overridden."""
    page = INFO % 'num_gpu_blocks="101",kv_cache_memory_bytes="1000",gpu_memory_utilization="0.9"'
    (got,) = read_page(page.encode(), VLLM).ranks
    assert (got.kv_capacity_bytes, got.gpu_memory_utilization) == (1000, None), "the ratio is void beside bytes"
    page = INFO % 'num_gpu_blocks="101",kv_cache_memory_bytes="1000",num_gpu_blocks_override="101"'
    assert read_page(page.encode(), VLLM).ranks[0].kv_capacity_bytes is None


def test_pid_label_takes_the_maximum() -> None:
    """0.9.2 to 0.11.0 with several API servers: one series per process, of which one is alive."""
    page = "".join(f'vllm:kv_cache_usage_perc{{engine="0",pid="{pid}"}} {v}\n' for pid, v in ((1, 0.2), (2, 0.7)))
    assert read_page(page.encode(), VLLM).ranks[0].kv_used_ratio == 0.7


@pytest.mark.parametrize("level", ["weights_offloaded", "discard_all"])
def test_asleep(level: str) -> None:
    """Either level of sleep is asleep; awake is not."""
    page = f'vllm:engine_sleep_state{{engine="0",sleep_state="{level}"}} 1.0\n'
    assert read_page(page.encode(), VLLM).ranks[0].asleep
    page = page.replace("1.0", "0.0")
    assert not read_page(page.encode(), VLLM).ranks[0].asleep


@pytest.mark.parametrize(
    ("line", "rejected"),
    [
        ('vllm:num_requests_running{engine="0"} NaN', 0),
        ('vllm:num_requests_running{engine="0"} +Inf', 0),
        ('vllm:num_requests_running{engine="0"} -3', 0),
        ('vllm:num_requests_running{engine="0} 3', 1),
        ('vllm:num_requests_running{engine="0"} three', 1),
        ('vllm:num_requests_running{engine="0"', 1),
        ("vllm:num_requests_running", 0),
    ],
)
def test_bad_lines(line: str, rejected: int) -> None:
    """A bad line costs its own value; the next line is read."""
    page = f'{line}\nvllm:num_requests_waiting{{engine="0"}} 7\n'
    got = read_page(page.encode(), VLLM)
    assert got.rejected_lines == rejected
    assert (got.ranks[0].running, got.ranks[0].waiting) == (None, 7)


def test_labels_with_quotes_and_newlines() -> None:
    """Escapes in labels are undone, and invalid UTF-8 does no harm."""
    page = b'vllm:num_requests_running{engine="0",model_name="a\\"b\\nc\xff"} 3\n'
    got = read_page(page, VLLM)
    assert got.model_name == 'a"b\nc\ufffd'
    assert got.ranks[0].running == 3


def test_duplicate_series() -> None:
    """A page with a series twice is read; the larger value counts."""
    page = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="0"} 4\n'
    assert read_page(page, VLLM).ranks[0].running == 4


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_every_field_is_mapped_or_unsupported(dialect: object) -> None:
    """A new field cannot be forgotten for an engine."""
    assert set(dialect.fields) | dialect.unsupported == set(FIELDS)  # type: ignore[attr-defined]
    assert not set(dialect.fields) & dialect.unsupported  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("argv", "port"),
    [
        ("vllm serve m", 8000),
        ("/usr/bin/python3 /opt/bin/vllm serve m --port 9", 9),
        ("vllm serve m --port=9", 9),
        ("python -m vllm.entrypoints.openai.api_server --port 12", 12),
        ("vllm serve m --port", 8000),
        ("vllm serve m --port x", 8000),
        ("vllm bench serve m", None),
        ("grep vllm serve-log", None),
        ("", None),
    ],
)
def test_launch_lines(argv: str, port: int | None) -> None:
    """Which command lines serve, and on which port."""
    assert launched(tuple(argv.split()), VLLM.launches) == port


# --------------------------------------------------------------------------------------- real servers

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[str]:
    """A raw TCP server; *serve* is called once per connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def answers(pages: dict[str, bytes], seen: list[str] | None = None) -> Serve:
    """Serve *pages* by path with 200, everything else with 404, over kept connections."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            if seen is not None:
                seen.append(head)
            body = pages.get(path)
            status = b"200 OK" if body is not None else b"404 Not Found"
            body = body or b""
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            await writer.drain()

    return serve


def raw(response: bytes) -> Serve:
    """Answer any request with *response* and hang up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()

    return serve


async def poll(url: str, polls: int = 1, **settings: object) -> EngineFacts:
    fetch = HttpFetch()
    engine = config.Engine(name="e", url=url, timeout_seconds=0.5, **settings)  # type: ignore[arg-type]
    source = EngineSource(engine, fetch, ManualClock())
    try:
        for _ in range(polls):
            facts = await source.read()
        return facts
    finally:
        await fetch.close()


PAGE = (CAPTURES / "0.32-load.prom").read_bytes()
MODELS = json.dumps({"data": [{"id": "tiny-llama", "max_model_len": 2048}]}).encode()


async def test_a_vllm_server() -> None:
    """Metrics, version and models of a well-behaved server; identity is asked once, over one connection."""
    heads: list[str] = []
    pages = {"/metrics": PAGE, "/version": b'{"version":"0.32.0"}', "/v1/models": MODELS}
    async with server(answers(pages, heads)) as url:
        facts = await poll(url, polls=3)
    assert facts.answer is Answer.OK
    assert (facts.version, facts.model_name, facts.max_model_len) == ("0.32.0", "tiny-llama", 2048)
    assert facts.ranks[0].running == 16
    asked = [head.split(" ")[1] for head in heads]
    assert asked == ["/metrics", "/version", "/v1/models", "/metrics", "/metrics"]
    assert all(head.startswith("GET ") for head in heads)
    assert all("Accept-Encoding: identity" in head for head in heads)


async def test_stats_disabled_server() -> None:
    """A vLLM without stats is up, known by its version."""
    pages = {"/metrics": (CAPTURES / "0.32-nostats.prom").read_bytes(), "/version": b'{"version":"0.32.0"}'}
    async with server(answers(pages)) as url:
        facts = await poll(url)
    assert (facts.answer, facts.ranks, facts.version) == (Answer.OK, (), "0.32.0")


async def test_some_other_exporter() -> None:
    """A page of metrics that is no engine's."""
    async with server(answers({"/metrics": b"# TYPE up gauge\nup 1\n"})) as url:
        assert (await poll(url)).answer is Answer.NOT_METRICS


async def test_nobody_listens() -> None:
    """Refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        facts = await poll(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert facts.answer is Answer.REFUSED


@pytest.mark.parametrize(
    ("response", "answer", "detail"),
    [
        (b"", Answer.FAILED, "broke off"),
        (b"garbage\r\n\r\n", Answer.FAILED, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Answer.FAILED, "broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Answer.FAILED, "broke off"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", Answer.FAILED, "broke off"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", Answer.UNAUTHORIZED, "401"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", Answer.UNAUTHORIZED, "403"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", Answer.FAILED, "500"),
        (b"HTTP/1.1 302 F\r\nLocation: http://example.com/\r\nContent-Length: 0\r\n\r\n", Answer.FAILED, "302"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<html></html", Answer.NOT_METRICS, "no engine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", Answer.NOT_METRICS, "no engine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Answer.NOT_METRICS, "no engine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xfe\x00\x01", Answer.NOT_METRICS, "no engine"),
    ],
)
async def test_answers_that_are_no_use(response: bytes, answer: Answer, detail: str) -> None:
    """Each is a fact about the engine with a reason, and nothing is followed."""
    async with server(raw(response)) as url:
        facts = await poll(url)
    assert facts.answer is answer
    assert detail in facts.detail


async def test_reset() -> None:
    """A connection that is reset."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with server(serve) as url:
        assert (await poll(url)).answer is Answer.FAILED


async def test_five_hundred_megabytes() -> None:
    """A flood is cut at the limit, long before it ends."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500000000\r\n\r\n")
        for _ in range(500):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
            sent += 1_000_000

    fetch = HttpFetch()
    async with server(serve) as url:
        source = EngineSource(config.Engine(name="e", url=url, timeout_seconds=20), fetch, ManualClock())
        facts = await source.read()
        await fetch.close()
    assert facts.answer is Answer.FAILED
    assert "larger than" in facts.detail
    assert sent < 4 * PAGE_BYTES


async def test_gzip_bomb() -> None:
    """A compressed answer, which we never asked for, is not unpacked."""
    bomb = gzip.compress(b"\0" * 100_000_000, compresslevel=9)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    async with server(raw(head + bomb)) as url:
        facts = await poll(url)
    assert facts.answer is Answer.FAILED
    assert "compressed" in facts.detail


@pytest.mark.parametrize("when", ["accept", "head", "body"])
async def test_hangs(when: str) -> None:
    """An engine that hangs at any point costs one timeout."""
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if when != "accept":
            await reader.readuntil(b"\r\n\r\n")
        if when == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            await writer.drain()
        await hold.wait()

    began = time.monotonic()
    async with server(serve) as url:
        facts = await poll(url)
        hold.set()
    assert facts.answer is Answer.FAILED
    assert "within 0.5 s" in facts.detail
    assert time.monotonic() - began < 5


async def test_unknown_host() -> None:
    """A name that does not resolve."""
    assert "not known" in (await poll("http://no-such-host.invalid:1")).detail


async def test_token(tmp_path: Path) -> None:
    """The key is read from its file at every poll and sent to the declared URL; a missing file is our failure."""
    heads: list[str] = []
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with server(answers({"/metrics": PAGE}, heads)) as url:
        await poll(url, bearer_token_file=str(token))
        assert all("Authorization: Bearer s3cret" in head for head in heads)
        token.unlink()
        with pytest.raises(SourceError, match="No such file"):
            await poll(url, bearer_token_file=str(token))


@pytest.mark.parametrize("kind", ["fifo", "binary", "folder"])
async def test_a_token_file_that_is_none(tmp_path: Path, kind: str) -> None:
    """A file that would keep us waiting, or is no text, is our failure with its name, at once."""
    token = tmp_path / "token"
    if kind == "fifo":
        os.mkfifo(token)
    elif kind == "binary":
        token.write_bytes(b"\xff\xfe")
    else:
        token.mkdir()
    with pytest.raises(SourceError, match="token: "):
        await poll("http://127.0.0.1:9", bearer_token_file=str(token))


async def test_neighbours_behind_one_address() -> None:
    """An engine that hangs does not starve another one behind the same host and port."""
    hold = asyncio.Event()

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/slow/" in head:
            await hold.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE))
        await writer.drain()

    fetch = HttpFetch()
    async with server(gateway) as url:
        slow, fast = (
            EngineSource(config.Engine(name=n, url=f"{url}/{n}", timeout_seconds=2), fetch, ManualClock())
            for n in ("slow", "fast")
        )
        hanging = asyncio.create_task(slow.read())
        await asyncio.sleep(0.1)
        assert (await fast.read()).answer is Answer.OK
        assert not hanging.done()
        hold.set()
        await hanging
        await fetch.close()


async def test_a_restarted_engine_is_asked_again() -> None:
    """Another process start time means another life: version and models are asked anew."""
    heads: list[str] = []
    pages = {"/metrics": PAGE, "/version": b'{"version":"0.32.0"}', "/v1/models": MODELS}
    fetch = HttpFetch()
    async with server(answers(pages, heads)) as url:
        source = EngineSource(config.Engine(name="e", url=url), fetch, ManualClock())
        await source.read()
        pages["/metrics"] = PAGE.replace(b"process_start_time_seconds 1.7", b"process_start_time_seconds 1.8")
        pages["/version"] = b'{"version":"0.33.0"}'
        assert (await source.read()).version == "0.33.0"
        await fetch.close()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"version": 3}', b'{"data": [3]}', b'{"data": {}}', b"[" * 100_000])
async def test_identity_that_makes_no_sense(body: bytes) -> None:
    """Version and models are a courtesy: nonsense there costs nothing else."""
    async with server(answers({"/metrics": PAGE, "/version": body, "/v1/models": body})) as url:
        facts = await poll(url)
    assert facts.answer is Answer.OK
    assert (facts.version, facts.max_model_len, facts.model_name) == (None, None, "tiny-llama")


async def test_slow_engines_are_asked_half_as_often(clock: ManualClock) -> None:
    """An answer over 100 ms doubles the period."""

    class Slow:
        async def __call__(self, url: str, limit: int, token: str | None, timeout: float) -> bytes:
            clock.advance(0.2)
            return PAGE

        async def close(self) -> None: ...

    source = EngineSource(config.Engine(name="e", url="http://h"), Slow(), clock)
    assert source.period_seconds == 5.0
    await source.read()
    assert source.period_seconds == 10.0


async def test_loading_is_not_down() -> None:
    """Nobody listens yet, but a process whose command line serves this port is on its way."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        code = "import time; time.sleep(60)"
        command = [sys.executable, "-c", code, "-m", "vllm.entrypoints.openai.api_server", f"--port={port}"]
        with subprocess.Popen(command) as child:
            wait_until(lambda: b"api_server" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
            fetch = HttpFetch()
            engine = config.Engine(name="e", url=f"http://127.0.0.1:{port}")
            clock = ManualClock()
            source = EngineSource(engine, fetch, clock, ProcReader())
            facts = await source.read()
            assert facts.answer is Answer.REFUSED
            assert facts.server is not None
            assert facts.server.pid == child.pid
            assert facts.server_age_seconds is not None
            assert 0 <= facts.server_age_seconds < 60
            assert source.period_seconds == 10.0
            child.kill()
            child.wait()
            clock.advance(5.0)
            assert (await source.read()).server is None
            await fetch.close()


@pytest.mark.parametrize("length", [str(10**400), "-1", "true", "2.5", '"2048"', "1e999"])
async def test_a_context_that_cannot_be(length: str) -> None:
    """What is no length of a context is absent: one engine's nonsense must not end up on everybody's page."""
    models = b'{"data": [{"id": "m", "max_model_len": %s}]}' % length.encode()
    async with server(answers({"/metrics": PAGE, "/v1/models": models})) as url:
        assert (await poll(url)).max_model_len is None


def test_a_page_of_eight_megabytes() -> None:
    """Whatever it holds, a bounded part of it is parsed: at most 2,000 lines, 8 KiB each, 64 ranks."""
    line = 'vllm:num_requests_running{engine="%d"} 1\n'
    flood = read_page("".join(line % n for n in range(150_000)).encode(), VLLM)
    assert len(flood.ranks) == 64
    assert flood.rejected_lines == 148_000
    long = read_page((line % 1 + f'vllm:num_requests_running{{engine="{"9" * 100_000}"}} 1\n').encode(), VLLM)
    assert [rank.rank for rank in long.ranks] == ["1"]
    assert long.rejected_lines == 1


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="%s"} 1' % ("9" * 5000),
        'vllm:cache_config_info{engine="0",num_gpu_blocks="1e300",block_size="16"} 1',
        'vllm:num_requests_running{engine="0"} 1e308',
        'vllm:cache_config_info{engine="0",num_gpu_blocks="-5",block_size="-16",kv_cache_size_tokens="1e30"} 1',
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="-100",kv_cache_memory_bytes="-5"} 1',
    ],
)
def test_numbers_beyond_reason(line: str) -> None:
    """They are absent, and the engine stays."""
    page = read_page(f'{line}\nvllm:num_requests_waiting{{engine="0"}} 7\n'.encode(), VLLM)
    zero = next(rank for rank in page.ranks if rank.rank == "0")
    assert zero.waiting == 7
    assert zero.running is None
    assert (zero.kv_capacity_tokens, zero.kv_capacity_bytes) == (None, None)


def test_one_line_of_seven_megabytes() -> None:
    """A line that is longer than any engine writes never reaches the parser, which would take minutes."""
    line = 'vllm:num_requests_running{engine="0",' + ",".join(f'l{n}="x"' for n in range(600_000)) + "} 1\n"
    page = read_page(line.encode() + b'vllm:num_requests_waiting{engine="0"} 7\n', VLLM)
    assert (page.rejected_lines, page.ranks[0].waiting) == (1, 7)


async def test_identity_survives_a_busy_moment(clock: ManualClock) -> None:
    """An engine without stats that is too busy to say its version for once is still the same engine."""
    pages = {"/metrics": (CAPTURES / "0.32-nostats.prom").read_bytes(), "/version": b'{"version":"0.32.0"}'}
    fetch = HttpFetch()
    async with server(answers(pages)) as url:
        source = EngineSource(config.Engine(name="e", url=url), fetch, clock)
        assert (await source.read()).version == "0.32.0"
        del pages["/version"]
        clock.advance(601.0)
        facts = await source.read()
        await fetch.close()
    assert (facts.answer, facts.version) == (Answer.OK, "0.32.0")


async def test_a_proxy_in_front_of_a_loading_engine() -> None:
    """docker-proxy accepts and hangs up while nobody listens behind it: the engine is loading, not unreachable."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with server(hang_up) as url:
        port = url.rpartition(":")[2]
        command = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "vllm.entrypoints.openai.api_server"]
        with subprocess.Popen([*command, "--port", port]) as child:
            wait_until(lambda: b"api_server" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
            fetch = HttpFetch()
            source = EngineSource(config.Engine(name="e", url=url), fetch, ManualClock(), ProcReader())
            facts = await source.read()
            await fetch.close()
            child.kill()
    assert facts.answer is Answer.FAILED
    assert facts.server is not None


async def test_a_change_of_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Begin and end, with the reason, and nothing in between."""
    caplog.set_level("INFO")
    pages = {"/metrics": PAGE}
    fetch = HttpFetch()
    async with server(answers(pages)) as url:
        source = EngineSource(config.Engine(name="e", url=url), fetch, ManualClock())
        for page in (PAGE, None, None, PAGE, PAGE):
            pages.pop("/metrics", None)
            if page:
                pages["/metrics"] = page
            await source.read()
        await fetch.close()
    assert [vars(r)["answer"] for r in caplog.records] == ["ok", "failed", "ok"]
    assert vars(caplog.records[1])["detail"] == "HTTP 404"
