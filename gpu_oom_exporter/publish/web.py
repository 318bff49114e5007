"""Serve /metrics, the health pages and the landing page; a scrape reads the report and never waits.

aiohttp has no deadline for a request's head, so `Gate` stands in front of it: it hands a connection over
once a whole head has arrived, bounds how many there are, and ends those whose readers stall.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from aiohttp import web

from gpu_oom_exporter import __version__
from gpu_oom_exporter.model import Report
from gpu_oom_exporter.publish.exposition import OPENMETRICS, TEXT, Page

log = logging.getLogger(__name__)

CONNECTIONS = 64
"""Connections at once. Two Prometheus and a person use three; a flood must not cost the tick its memory."""

HEAD_BYTES = 16384
HEAD_SECONDS = 5.0
"""A client that has not sent a request's head by then is closed (slow loris)."""

IDLE_SECONDS = 75.0
"""An idle kept connection is closed after this: longer than Prometheus' default scrape interval of 60 s."""

STALL_SECONDS = 10.0
"""A client that takes no byte of its answer for this long is cut off."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}


class ListenError(Exception):
    """An address cannot be listened on; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest report and how long ago its tick was; `report` is None before the first complete tick."""

    report: Report | None
    age_seconds: float
    limit_seconds: float

    @property
    def problem(self) -> str | None:
        """One sentence that says why there is no page, or None when there is one."""
        if self.report is None:
            return "Starting: not every source has been read yet."
        if self.age_seconds > self.limit_seconds:
            return (
                f"Frozen: the last reading is {self.age_seconds:.0f} s old, more than the {self.limit_seconds:.0f} s "
                "allowed. See the daemon's log."
            )
        return None


class Site:
    """The pages. *latest* is asked at every request; *telemetry_path* is where the metrics are."""

    def __init__(self, latest: Callable[[], Latest], page: Page, telemetry_path: str = "/metrics") -> None:
        self.latest = latest
        self.page = page
        self.telemetry_path = telemetry_path
        self.app = web.Application(client_max_size=HEAD_BYTES)
        self.app.router.add_get(telemetry_path, self.metrics)
        self.app.router.add_get("/-/healthy", self.healthy)
        self.app.router.add_get("/-/ready", self.ready)
        if telemetry_path != "/":
            self.app.router.add_get("/", self.landing)
        self.app.on_response_prepare.append(_add_headers)

    async def metrics(self, request: web.Request) -> web.Response:
        """The metrics page, in the format and encoding the client prefers."""
        latest = self.latest()
        if latest.report is None or latest.problem is not None:
            return _text(503, latest.problem or "")
        openmetrics = _prefers_openmetrics(request.headers.get("Accept", ""))
        compressed = _accepts_gzip(request.headers.get("Accept-Encoding", ""))
        headers = {"Content-Type": OPENMETRICS if openmetrics else TEXT, "Vary": "Accept, Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=self.page.body(latest.report, openmetrics, compressed), headers=headers)

    async def healthy(self, _: web.Request) -> web.Response:
        """200 unless the daemon had a reading and has stopped making new ones: then a restart is right."""
        latest = self.latest()
        if latest.report is not None and latest.problem is not None:
            return _text(503, latest.problem)
        return _text(200, "Healthy.")

    async def ready(self, _: web.Request) -> web.Response:
        """200 when there is a page to scrape."""
        problem = self.latest().problem
        return _text(503, problem) if problem else _text(200, "Ready.")

    async def landing(self, _: web.Request) -> web.Response:
        """Where to go from here."""
        latest = self.latest()
        state = latest.problem or "All well: readings are fresh."
        path = escape(self.telemetry_path)
        return web.Response(
            text=(
                "<!doctype html><html lang=en><head><meta charset=utf-8><title>gpu_oom_exporter</title>"
                "<style>body{font:16px/1.5 system-ui,sans-serif;margin:3rem auto;max-width:40rem;padding:0 1rem}"
                "</style></head><body>"
                f"<h1>gpu_oom_exporter {escape(__version__)}</h1><p>{escape(state)}</p>"
                f'<ul><li><a href="{path}">Metrics</a> for Prometheus</li>'
                '<li><a href="/-/healthy">Healthy</a>: does the daemon live?</li>'
                '<li><a href="/-/ready">Ready</a>: is there a page to scrape?</li></ul></body></html>\n'
            ),
            content_type="text/html",
        )


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(SECURITY_HEADERS)


def _text(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, text=sentence + "\n")


def _accepts_gzip(accept: str) -> bool:
    for part in accept.split(","):
        coding, _, weight = part.replace(" ", "").partition(";q=")
        if coding == "gzip":
            return weight.strip("0.") != "" or weight == ""
    return False


def _prefers_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1.0 has at least the weight of the text format in an Accept header."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
            if kind == "application/openmetrics-text" and name.strip() == "version" and not value.startswith("1."):
                weight = 0.0
        if kind in weights:
            weights[kind] = max(weights[kind], weight)
    return weights["application/openmetrics-text"] > 0 and (
        weights["application/openmetrics-text"] >= weights["text/plain"]
    )


# ------------------------------------------------------------------------------------------ the server


class Gate:
    """Makes the protocol of each new connection, and watches those that were handed over."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self.loop = loop
        self.open: dict[asyncio.Transport, int] = {}
        self.half_closed: set[asyncio.Transport] = set()
        self._watch = loop.call_later(STALL_SECONDS, self._end_stalled)

    def __call__(self) -> asyncio.Protocol:
        """A protocol for one more connection."""
        return _Head(self)

    def admit(self, transport: asyncio.Transport) -> bool:
        """Whether there is room for *transport*."""
        for closed in [t for t in self.open if t.is_closing()]:
            del self.open[closed]
            self.half_closed.discard(closed)
        if len(self.open) >= CONNECTIONS:
            # the oldest that is waiting for nothing makes room: idle connections must not lock Prometheus out
            idle = next((t for t in self.open if not t.get_write_buffer_size()), None)
            if idle is None:
                return False
            idle.abort()
            del self.open[idle]
        self.open[transport] = 0
        return True

    def close(self) -> None:
        """End every connection."""
        self._watch.cancel()
        for transport in self.open:
            transport.abort()
        self.open.clear()

    def _end_stalled(self) -> None:
        for transport, before in list(self.open.items()):
            waiting = 0 if transport.is_closing() else transport.get_write_buffer_size()
            if waiting == before and (waiting or transport in self.half_closed):
                transport.abort()
            if transport.is_closing():
                del self.open[transport]
                self.half_closed.discard(transport)
            else:
                self.open[transport] = waiting
        self._watch = self.loop.call_later(STALL_SECONDS, self._end_stalled)


class _Head(asyncio.Protocol):
    """Collects the head of a connection's first request, then hands everything on to aiohttp's protocol."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.buffer = bytearray()
        self.transport: asyncio.Transport | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self.gate.admit(transport):
            transport.abort()
            return
        self.transport = transport
        self.deadline = self.gate.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.inner is not None:
            self.inner.data_received(data)
            return
        if self.transport is None:
            return
        # empty lines before a request are allowed, and are no request
        self.buffer += data if self.buffer else data.lstrip(b"\r\n")
        if b"\r\n\r\n" not in self.buffer:
            if len(self.buffer) > HEAD_BYTES:
                self.transport.abort()
            return
        if self.deadline is not None:
            self.deadline.cancel()
        self.inner = self.gate.inner()
        self.inner.connection_made(self.transport)
        self.inner.data_received(bytes(self.buffer))
        self.buffer.clear()

    def eof_received(self) -> bool:
        """A client that has said everything still waits for its answer; `Gate` ends it when that is out."""
        if self.inner is None or self.transport is None:
            return False
        self.gate.half_closed.add(self.transport)
        return True

    def pause_writing(self) -> None:
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self.inner is not None:
            self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        if self.inner is not None:
            self.inner.connection_lost(exc)


class Server:
    """Listens on *addresses* (``host:port``) and serves a `Site`; an async context manager."""

    def __init__(self, site: Site, addresses: tuple[str, ...]) -> None:
        self.site = site
        self.addresses = addresses
        self.bound: list[tuple[str, int]] = []
        self._runner = web.AppRunner(
            site.app,
            access_log=None,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=0.0,
            shutdown_timeout=0.5,
            max_line_size=8190,
            max_field_size=8190,
            handle_signals=False,
        )
        self._servers: list[asyncio.Server] = []
        self._gate: Gate | None = None

    async def __aenter__(self) -> Server:
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None
        self._gate = Gate(self._runner.server, loop)
        for address in self.addresses:
            host, port = split_address(address)
            try:
                server = await loop.create_server(self._gate, host or None, port, backlog=CONNECTIONS)
            except (OSError, OverflowError, UnicodeError) as err:
                await self.__aexit__()
                detail = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
                if getattr(err, "errno", None) == errno.EADDRINUSE:
                    detail += ". Is it running already? Another address is set with --web.listen-address"
                raise ListenError(f"cannot listen on {address}: {detail}") from err
            self._servers.append(server)
            self.bound += [s.getsockname()[:2] for s in server.sockets]
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        if self._gate is not None:
            self._gate.close()
        await self._runner.cleanup()


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of ``host:port``, ``[v6]:port`` or ``:port``; `ListenError` when it is none of them."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ListenError(f"{address!r} is not an address to listen on; write host:port, for example 127.0.0.1:10140")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ListenError(f"{address!r} is not an address to listen on; write an IPv6 address as [::1]:10140")
    return host, int(port)
