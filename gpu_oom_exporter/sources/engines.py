"""Fetch the pages of inference servers and read the few lines we need.

A guest: one kept connection, GET only, three paths at most, no redirects, bounded time and bytes.
An engine that does not answer is a fact about the engine, not a failure of this source.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gpu_oom_exporter import __version__, config
from gpu_oom_exporter.catalog.engines import BY_NAME, Dialect, Launch, words_at
from gpu_oom_exporter.model import Answer, EngineFacts, EngineRank, Process, Reason
from gpu_oom_exporter.sources.board import Clock, SourceError
from gpu_oom_exporter.sources.procfs import Reader as ProcReader

log = logging.getLogger(__name__)

PAGE_BYTES = 8 * 1024 * 1024
"""A page of 60 KiB is normal; a proxy's error page or an endless stream is cut here."""

WANTED_LINES, LINE_BYTES, RANKS = 2000, 8192, 64
"""As much of a page is read: 64 ranks make 700 lines of at most 2 KiB. More is no engine but an attack."""

EXACT = 2.0**53
"""Whole numbers beyond this are no counts of anything here."""

IDENTITY_BYTES = 256 * 1024
IDENTITY_AGAIN_SECONDS = 600.0
"""Version and models are asked again this often, and after every restart."""

SLOW_SECONDS = 0.1
"""An answer slower than this costs the engine something: ask half as often."""

HEADERS = {
    "Accept": "text/plain;version=0.0.4",
    "Accept-Encoding": "identity",  # a compressed answer is a bomb until it is unpacked
    "User-Agent": f"gpu-oom-exporter/{__version__}",
}


class FetchError(Exception):
    """No usable answer: how the engine answered, and a sentence."""

    def __init__(self, answer: Answer, detail: str, unconnected: bool = False) -> None:
        super().__init__(detail)
        self.answer = answer
        self.detail = detail
        self.unconnected = unconnected
        """No HTTP answer came: nobody listens, or a proxy in front of nobody hung up."""


class Fetch(Protocol):
    """GET *url*; return the body of a 200 answer, or raise `FetchError`."""

    async def __call__(self, url: str, limit: int, token: str | None, timeout: float) -> bytes:
        """At most *limit* bytes within *timeout* seconds."""

    async def close(self) -> None:
        """Let go of the connections."""


class HttpFetch:
    """Fetches over HTTP with kept connections, one for each engine."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, url: str, limit: int, token: str | None, timeout: float) -> bytes:
        """The body of *url*, which must be a 200 answer of at most *limit* bytes."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # each engine polls one thing at a time; a limit per host would let one that hangs starve its neighbour
                connector=aiohttp.TCPConnector(limit_per_host=0, ttl_dns_cache=60),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=HEADERS,
                auto_decompress=False,
                trust_env=False,
                max_line_size=16384,
                max_field_size=16384,
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.get(url, headers=headers, allow_redirects=False) as got,
            ):
                if got.status in (401, 403):
                    raise FetchError(Answer.UNAUTHORIZED, f"HTTP {got.status}")
                if got.status != 200:
                    raise FetchError(Answer.FAILED, f"HTTP {got.status}")
                if got.headers.get("Content-Encoding", "identity") != "identity":
                    got.close()
                    raise FetchError(Answer.FAILED, "the answer is compressed although we asked for plain text")
                body = bytearray()
                async for chunk in got.content.iter_any():
                    body += chunk
                    if len(body) > limit:
                        got.close()
                        raise FetchError(Answer.FAILED, f"the answer is larger than {limit} bytes")
                return bytes(body)
        except TimeoutError:
            raise FetchError(Answer.FAILED, f"no complete answer within {timeout:g} s") from None
        except aiohttp.ClientConnectorCertificateError as err:
            raise FetchError(Answer.FAILED, f"the certificate is not trusted: {err.certificate_error}") from err
        except aiohttp.ClientConnectorDNSError as err:
            raise FetchError(Answer.FAILED, f"the host name is not known: {err.host}") from err
        except aiohttp.ClientConnectorError as err:
            if isinstance(err.os_error, ConnectionRefusedError):
                raise FetchError(Answer.REFUSED, "nobody listens", True) from err
            raise FetchError(Answer.FAILED, f"no connection: {err.strerror or err.os_error}") from err
        except (aiohttp.ClientError, ValueError, OSError) as err:
            hung_up = isinstance(err, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError)
            raise FetchError(Answer.FAILED, f"the answer broke off: {type(err).__name__}", hung_up) from err

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


# ------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True, slots=True)
class Page:
    """What a metrics page tells about one engine."""

    known: bool
    prometheus: bool = True
    model_name: str | None = None
    ranks: tuple[EngineRank, ...] = ()
    rejected_lines: int = 0
    started: float | None = None


Series = dict[str, list[tuple[Mapping[str, str], float]]]
STARTED = "process_start_time_seconds"


def read_page(page: bytes, dialect: Dialect) -> Page:
    """Read *page* in *dialect*. Only lines of the families we need are parsed: a full parse costs 11 ms."""
    page = page[:PAGE_BYTES]
    names = {name for f in dialect.fields.values() for name in f.names}
    names |= {dialect.info, dialect.sleep, STARTED, *dialect.v0_marks} - {""}
    starts = tuple(f"{name}{end}".encode() for name in sorted(names) for end in "{ ")
    lines = page.split(b"\n")
    wanted = [line for line in lines if line.startswith(starts)]
    rejected_lines = max(0, len(wanted) - WANTED_LINES) + sum(len(line) > LINE_BYTES for line in wanted[:WANTED_LINES])
    wanted = [line for line in wanted[:WANTED_LINES] if len(line) <= LINE_BYTES]
    prefix = dialect.prefix.encode()
    known = any(line.startswith(prefix) for line in wanted) or any(line.startswith(prefix) for line in lines)
    series, bad = _parse(wanted)
    rejected = bad + rejected_lines
    started = max((value for _, value in series.get(STARTED, ())), default=None)
    prometheus = known or started is not None or b"# TYPE " in page
    if not known:
        return Page(False, prometheus, rejected_lines=rejected, started=started)
    return Page(True, True, _model_name(series), _ranks(series, dialect), rejected, started)


def _parse(lines: list[bytes]) -> tuple[Series, int]:
    series: Series = {}
    rejected = 0
    text = [line.decode(errors="replace") for line in lines]
    try:
        _collect(series, text)
    except ValueError:  # one bad line spoils the parser's stream: find it by taking them one by one
        series = {}
        for line in text:
            try:
                _collect(series, [line])
            except ValueError:
                rejected += 1
    return series, rejected


def _collect(series: Series, lines: Iterable[str]) -> None:
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if math.isfinite(sample.value):
                series.setdefault(sample.name, []).append((sample.labels, float(sample.value)))


def _model_name(series: Series) -> str | None:
    names = [labels["model_name"] for found in series.values() for labels, _ in found if labels.get("model_name")]
    return min(names, default=None)


def _ranks(series: Series, dialect: Dialect) -> tuple[EngineRank, ...]:
    values: dict[str, dict[str, float]] = {}

    def put(rank: str, name: str, value: float) -> None:
        # several processes of one server report the same rank (`pid` label): the largest is the truth
        own = values.setdefault(rank, {})
        own[name] = max(own.get(name, value), value)

    for name, where in dialect.fields.items():
        for spelled in where.names:
            found = [
                (labels, v) for labels, v in series.get(spelled, ()) if all(labels.get(k) == x for k, x in where.only)
            ]
            for labels, value in found:
                put(labels.get(dialect.rank_label, "0"), name, value)
            if found:
                break
    for labels, value in series.get(dialect.sleep, ()):
        if any(labels.get(k) == x for k, x in dialect.asleep):
            put(labels.get(dialect.rank_label, "0"), "asleep", value)
    infos: dict[str, Mapping[str, str]] = {}
    for labels, _ in series.get(dialect.info, ()):
        infos[labels.get(dialect.rank_label, "0")] = labels
    v0 = any(mark in series for mark in dialect.v0_marks)
    # 0.7.3..0.9.1 put no rank on the info family: with one rank it can only be that one's
    if len(infos) == 1 and len(values) == 1:
        infos = {next(iter(values)): next(iter(infos.values()))}
    names = sorted({*values, *infos}, key=_order)[:RANKS]
    return tuple(_rank(name, values.get(name, {}), infos.get(name, {}), v0, len(names)) for name in names)


def _order(rank: str) -> tuple[int, str]:
    return (int(rank), rank) if rank.isdecimal() and len(rank) < 10 else (2**31, rank)


def _rank(rank: str, values: Mapping[str, float], info: Mapping[str, str], v0: bool, ranks: int) -> EngineRank:
    ratio = _within(values.get("kv_used_ratio"), 0.0, 1.0)
    running, waiting = _count(values.get("running")), _count(values.get("waiting"))
    if info and "preemptions_total" in values and {"kv_used_ratio", "running", "waiting"}.isdisjoint(values):
        # with several API servers the gauges do not exist before the first step: idle, not unknown
        ratio, running, waiting = 0.0, 0, 0
    capacity, used_of = _pool_tokens(info, v0, ranks)
    override, pool = _positive(info.get("num_gpu_blocks_override")), _positive(info.get("kv_cache_memory_bytes"))
    return EngineRank(
        rank=rank,
        kv_used_ratio=ratio,
        kv_capacity_tokens=capacity,
        kv_used_tokens=None if ratio is None or used_of is None else round(ratio * used_of),
        # a flag's value; with an override of the block count it is not the size of the pool
        kv_capacity_bytes=None if override is not None or pool is None else int(pool),
        running=running,
        waiting=waiting,
        waiting_for_capacity=_count(values.get("waiting_for_capacity")),
        preemptions_total=_count(values.get("preemptions_total")),
        asleep=values.get("asleep", 0.0) > 0,
        gpu_memory_utilization=_within(_number(info.get("gpu_memory_utilization")), 0.0, 1.0) if pool is None else None,
    )


def _pool_tokens(info: Mapping[str, str], v0: bool, ranks: int) -> tuple[int | None, int | None]:
    """(capacity in tokens, tokens that usage 1.0 stands for); None where a page cannot tell.

    V1 keeps one null block that no request can have, and its usage is a share of the others
    (`get_usage` in vLLM's block pool). `num_gpu_blocks` is the sum over data-parallel ranks.
    `kv_cache_size_tokens` (since 0.24.0) is one rank's and right for hybrid models and context parallelism
    too; where it is not blocks × block size, usage × capacity would be wrong.
    """
    blocks, size = _positive(info.get("num_gpu_blocks")), _positive(info.get("block_size"))
    told = _positive(info.get("kv_cache_size_tokens"))
    override = _positive(info.get("num_gpu_blocks_override"))
    if told is None and (ranks > 1 or info.get("sliding_window", "None") != "None"):
        return None, None
    own = override if override is not None else (blocks / ranks if blocks is not None else None)
    if own is None or size is None or (told is not None and own * size != told):
        return (None if told is None else int(told)), None
    usable = int((own if v0 else own - 1) * size)
    return (usable, usable) if usable > 0 else (None, None)


def _number(text: str | None) -> float | None:
    """The number in a Python repr such as ``"16"``, ``"0.92"`` or ``"None"``."""
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < EXACT else None


def _positive(text: str | None) -> float | None:
    value = _number(text)
    return value if value is not None and value > 0 else None


def _within(value: float | None, low: float, high: float) -> float | None:
    return value if value is not None and low <= value <= high else None


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and 0 <= value < EXACT else None


# ----------------------------------------------------------------------------------------- the source


def launched(argv: tuple[str, ...], launches: Iterable[Launch]) -> int | None:
    """The port that a command line of one of *launches* serves; None when it is another program."""
    for launch in launches:
        if words_at(argv, launch.words) >= 0:
            return _port(argv, launch)
    return None


def _port(argv: tuple[str, ...], launch: Launch) -> int:
    for at, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag == launch.port_flag:
            text = value if equals else (argv[at + 1] if at + 1 < len(argv) else "")
            return int(text) if text.isdecimal() else launch.default_port
    return launch.default_port


def is_local(host: str | None) -> bool:
    """Whether *host* is this machine, as far as its spelling says."""
    if host is None:
        return False
    return host.startswith("127.") or host in ("localhost", "::1", "0.0.0.0", socket.gethostname())


class EngineSource:
    """One declared engine, polled on its own period."""

    name = "engines"

    def __init__(
        self,
        engine: config.Engine,
        fetch: Fetch,
        clock: Clock,
        proc: ProcReader | None = None,
        read_file: Callable[[str], str] | None = None,
    ) -> None:
        self.engine = engine
        self.dialect = BY_NAME[engine.kind]
        self.fetch = fetch
        self.clock = clock
        self.proc = proc
        self.key = engine.name
        self.timeout_seconds = 2.0 * engine.timeout_seconds + 1.0  # the page, then twice half of it for identity
        self.stale_seconds = 4.0 * engine.period_seconds + engine.timeout_seconds
        parts = urlsplit(engine.url)
        self.local = is_local(parts.hostname)
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._read_file = read_file or _file
        self._slow = False
        self._identity: tuple[str | None, str | None, int | None] = (None, None, None)
        self._asked = float("-inf")
        self._answer: Answer | None = None
        self._started: float | None = None

    @property
    def period_seconds(self) -> float:
        """The configured period, doubled while the engine is slow or loading."""
        return self.engine.period_seconds * (2.0 if self._slow else 1.0)

    async def read(self) -> EngineFacts:
        """One poll. Whatever the engine does is a fact; only our own trouble is an error."""
        began = self.clock.mono()
        token = self._token()
        facts = EngineFacts(
            self.engine.name, self.engine.kind, self.engine.url, Answer.OK, local=self.local, port=self.port
        )
        try:
            body = await self.fetch(
                self.engine.url + self.dialect.metrics_path, PAGE_BYTES, token, self.engine.timeout_seconds
            )
        except FetchError as err:
            facts = replace(facts, answer=err.answer, detail=err.detail, seconds=self.clock.mono() - began)
            if err.unconnected and self.local:
                facts = self._with_server(facts)
            self._tell(facts)
            self._slow = facts.server is not None
            return facts
        seconds = self.clock.mono() - began
        self._slow = seconds > SLOW_SECONDS
        page = read_page(body, self.dialect)
        if page.started != self._started:
            self._started, self._identity, self._asked = page.started, (None, None, None), float("-inf")
        if self.clock.mono() - self._asked > IDENTITY_AGAIN_SECONDS:
            identity = await self._identify(token)
            if identity != (None, None, None):
                self._identity = identity  # an engine that was too busy to say is still the same
                self._asked = self.clock.mono()
        version, model, length = self._identity
        if not page.prometheus or (not page.known and version is None and model is None):
            facts = replace(
                facts, answer=Answer.NOT_METRICS, detail="the page has no engine's metrics", seconds=seconds
            )
            self._tell(facts)
            return facts
        facts = replace(
            facts,
            seconds=seconds,
            version=version,
            model_name=page.model_name or model,
            max_model_len=length,
            ranks=page.ranks,
            rejected={"line": page.rejected_lines} if page.rejected_lines else {},
        )
        self._tell(facts)
        return facts

    def _tell(self, facts: EngineFacts) -> None:
        """Log when the engine begins to answer otherwise than before, with the reason."""
        if facts.answer is not self._answer:
            level = logging.INFO if facts.answer is Answer.OK else logging.WARNING
            pairs = {"engine": self.engine.name, "answer": str(facts.answer), "detail": facts.detail}
            log.log(level, "engine answers", extra=pairs)
            self._answer = facts.answer

    def _token(self) -> str | None:
        if self.engine.bearer_token_file is None:
            return None
        try:
            return self._read_file(self.engine.bearer_token_file).strip()
        except (OSError, ValueError) as err:
            why = err.strerror if isinstance(err, OSError) else "is not UTF-8 text in a regular file"
            name, path = self.engine.name, self.engine.bearer_token_file
            raise SourceError(Reason.NO_PERMISSION, f"engine {name}: {path}: {why}") from err

    async def _identify(self, token: str | None) -> tuple[str | None, str | None, int | None]:
        """(version, model, longest context in tokens), each None when the engine does not tell."""
        version = model = None
        length = None
        told = await self._json(self.dialect.version_path, token)
        if isinstance(told, dict) and isinstance(told.get("version"), str):
            version = told["version"][:64]
        told = await self._json(self.dialect.models_path, token)
        if isinstance(told, dict) and isinstance(told.get("data"), list) and told["data"]:
            first = told["data"][0]
            if isinstance(first, dict):
                model = first["id"] if isinstance(first.get("id"), str) else None
                longest = first.get("max_model_len")
                length = longest if type(longest) is int and 0 < longest < EXACT else None
        return version, model, length

    async def _json(self, path: str, token: str | None) -> Any:
        if not path:
            return None
        try:
            body = await self.fetch(self.engine.url + path, IDENTITY_BYTES, token, self.engine.timeout_seconds / 2)
            return json.loads(body)
        except (FetchError, ValueError, RecursionError):
            return None

    def _with_server(self, facts: EngineFacts) -> EngineFacts:
        """Nobody listens: see whether a process is on its way to do so (a load takes minutes)."""
        if self.proc is None:
            return facts
        server = self.find_server(self.proc)
        if server is None:
            return facts
        return replace(facts, server=server, server_age_seconds=self.proc.age_seconds(server))

    def find_server(self, proc: ProcReader) -> Process | None:
        """The process whose command line serves this engine's port, the youngest if there are several."""
        launches = self.dialect.launches
        found = proc.servers(lambda argv: launched(argv, launches) == self.port, self.clock.mono())
        return max((p for p in found if p.state not in "ZX"), key=lambda p: p.start_ticks, default=None)

    async def close(self) -> None:
        """The connections belong to `fetch`, which the daemon closes."""


def _file(path: str) -> str:
    """The text of a regular file; anything else could keep us waiting for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("is no regular file")
        return os.read(file, 65536).decode()
    finally:
        os.close(file)
