"""The web pages: formats, states, and clients that are slow, many, or hostile."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpu_oom_exporter.model import Report
from gpu_oom_exporter.publish import web
from gpu_oom_exporter.publish.exposition import OPENMETRICS, TEXT, Page
from gpu_oom_exporter.publish.web import Latest, ListenError, Server, Site, split_address

NEW = Latest(Report(time=1.0), 0.5, 30.0)
STARTING = Latest(None, 0.5, 30.0)
FROZEN = Latest(Report(time=1.0), 31.0, 30.0)


@asynccontextmanager
async def serving(latest: Latest = NEW, path: str = "/metrics") -> AsyncIterator[str]:
    async with Server(Site(lambda: latest, Page(5000), path), ("127.0.0.1:0",)) as server:
        yield f"http://127.0.0.1:{server.bound[0][1]}"


async def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(url, headers={k.replace("_", "-"): v for k, v in headers.items()}) as got,
    ):
        return got.status, await got.read(), dict(got.headers)


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=x", TEXT),
        (";;;,,,q=", TEXT),
    ],
)
async def test_formats(accept: str, kind: str) -> None:
    """The client's Accept header decides, and the page parses as what it claims to be."""
    async with serving() as url:
        status, body, headers = await get(url + "/metrics", Accept=accept, Accept_Encoding="identity")
    assert (status, headers["Content-Type"]) == (200, kind)
    parse = parse_openmetrics if kind == OPENMETRICS else parse_text
    assert "gpu_oom_build_info" in {family.name for family in parse(body.decode())}


async def test_gzip() -> None:
    """Compressed when asked for."""
    async with serving() as url:
        _, plain, headers = await get(url + "/metrics", Accept_Encoding="identity")
        assert "Content-Encoding" not in headers
        _, packed, headers = await get(url + "/metrics", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == plain


@pytest.mark.parametrize(
    ("latest", "metrics", "ready", "healthy"),
    [(NEW, 200, 200, 200), (STARTING, 503, 503, 200), (FROZEN, 503, 503, 503)],
)
async def test_states(latest: Latest, metrics: int, ready: int, healthy: int) -> None:
    """No page before the first tick, none from a frozen daemon; a sentence says why."""
    async with serving(latest) as url:
        got = [await get(url + path) for path in ("/metrics", "/-/ready", "/-/healthy")]
        landing = await get(url + "/")
    assert [status for status, _, _ in got] == [metrics, ready, healthy]
    if metrics == 503:
        sentence = got[0][1].decode()
        assert sentence.endswith(".\n")
        assert sentence.count("\n") == 1
    assert landing[0] == 200


async def test_landing_page() -> None:
    """It leads to the metrics, wherever they are, and headers keep it harmless."""
    async with serving(path="/gpu") as url:
        status, body, headers = await get(url + "/")
        assert (await get(url + "/gpu"))[0] == 200
        assert (await get(url + "/metrics"))[0] == 404
    assert status == 200
    assert b'href="/gpu"' in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]


async def test_nothing_but_get() -> None:
    """A daemon that only tells has nothing to be posted to."""
    async with serving() as url, aiohttp.ClientSession() as session:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with session.request(method, url + "/metrics", data=b"x" * 100_000) as got:
                assert got.status == 405


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def ends(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"\r\n\r\n", b"\r\n\r\nGET /metr"])
async def test_slow_loris(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not finish its request's head is closed."""
    monkeypatch.setattr(web, "HEAD_SECONDS", 0.2)
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(sent)
        assert await ends(reader) == b""
        writer.close()
        assert (await get(url + "/metrics"))[0] == 200


async def test_head_in_pieces() -> None:
    """A head that comes byte by byte, but comes, is answered."""
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        for byte in b"GET /-/healthy HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await ends(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_half_closed() -> None:
    """A client that closes its side after the request still gets its answer."""
    async with serving() as url:
        for version in (b"1.0", b"1.1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(b"GET /metrics HTTP/%s\r\nHost: h\r\nConnection: close\r\n\r\n" % version)
            writer.write_eof()
            assert b"gpu_oom_build_info" in await ends(reader)
            writer.close()


async def test_half_closed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asked to keep a connection which it has closed is let go soon."""
    monkeypatch.setattr(web, "STALL_SECONDS", 0.1)
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(b"GET /-/healthy HTTP/1.1\r\nHost: h\r\n\r\n")
        writer.write_eof()
        assert b"Healthy" in await ends(reader)
        writer.close()


async def test_endless_head() -> None:
    """A head without end is cut off."""
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)
        assert await ends(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /%zz%00 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 9000 + b"\r\nConnection: close\r\n\r\n",
    ],
)
async def test_bad_requests(request_bytes: bytes) -> None:
    """Nonsense gets an error or a closed connection, and the next client is served."""
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(request_bytes)
        writer.write_eof()
        await ends(reader)
        writer.close()
        assert (await get(url + "/metrics"))[0] == 200


async def test_many_connections() -> None:
    """A flood of idle connections does not lock a scraper out: the oldest idle one makes room."""
    async with serving() as url:
        held = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(web.CONNECTIONS + 10)]
        assert (await get(url + "/metrics"))[0] == 200
        assert await ends(held[0][0]) == b"", "the oldest has gone"
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("accept", "packed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("", False),
        ("br", False),
    ],
)
async def test_encodings(accept: str, packed: bool) -> None:
    """Weights count here too."""
    async with serving() as url:
        _, _, headers = await get(url + "/metrics", Accept_Encoding=accept)
    assert ("Content-Encoding" in headers) is packed


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing of its answers is cut off, and does not slow the others down."""
    monkeypatch.setattr(web, "STALL_SECONDS", 0.2)
    async with serving() as url:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(url), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(20_000):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
        end = time.monotonic() + 10
        slowest = 0.0
        while not writer.transport.is_closing() and time.monotonic() < end:
            began = time.monotonic()
            assert (await get(url + "/metrics"))[0] == 200
            slowest = max(slowest, time.monotonic() - began)
            try:
                writer.write(b"\r\n")
                await asyncio.wait_for(writer.drain(), 0.2)
            except (ConnectionError, TimeoutError):
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)
                writer.transport.pause_reading() if not writer.transport.is_closing() else None  # type: ignore[attr-defined]
        assert writer.transport.is_closing()
        assert slowest < 2.0


async def test_port_in_use() -> None:
    """A port that is taken is one sentence."""
    async with serving() as url:
        with pytest.raises(ListenError, match=r"cannot listen on 127\.0\.0\.1:"):
            async with Server(Site(lambda: NEW, Page(10)), (f"127.0.0.1:{port_of(url)}",)):
                pass


async def test_names_that_cannot_be() -> None:
    """A host name that no resolver takes is one sentence as well."""
    for address in ("..:10140", f"{'x' * 64}.example:10140"):
        with pytest.raises(ListenError, match="cannot listen on"):
            async with Server(Site(lambda: NEW, Page(10)), (address,)):
                pass


@pytest.mark.parametrize(
    ("address", "split"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        (":80", ("", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(address: str, split: tuple[str, int]) -> None:
    """What may be listened on."""
    assert split_address(address) == split


@pytest.mark.parametrize("address", ["", "80", "host", "host:", "host:x", "host:70000", "::1:80", "host:-1"])
def test_bad_addresses(address: str) -> None:
    """Everything else is a sentence with an example."""
    with pytest.raises(ListenError, match="write"):
        split_address(address)
