"""One connection over time: heads and bodies that trickle, bodies around the limit, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec
import pytest

from ipc.messages import Finish
from server import body, connection
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.http_calls import TEXT, post, refusal
from tests.local_server import LocalServer, local_server
from tests.rank_pair import DEADLINE_S, until

LIMIT: Final = 2**20
HEAD: Final = b"POST %b HTTP/1.1\r\nHost: x\r\n" % TEXT.encode()
SHORT_S: Final = 0.1
TRICKLE_S: Final = 0.01


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("connection") / "tiny"))


@pytest.fixture
async def server(tokenizer: TextTokenizer) -> AsyncIterator[LocalServer]:
    async with local_server(tokenizer, max_body_mb=LIMIT // 2**20) as running:
        yield running


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, until somebody hangs up."""
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await asyncio.sleep(TRICKLE_S)


async def what_came(server: LocalServer, first: bytes, slowly: bytes) -> bytes:
    """All that the server says until it closes a connection on which `slowly` trickles behind `first`."""
    reader, writer = await server.connect()
    writer.write(first)
    sending = asyncio.create_task(trickle(writer, slowly))
    said = b""
    # A reset is a way to hang up too: it is what a client gets whose bytes were still under way.
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.transport.abort()
    return said


def error_of(response: bytes) -> tuple[bytes, str]:
    """Status line and error code of the bytes of a refusal."""
    head, _, document = response.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], msgspec.json.decode(document)["error"]["code"]


# ---- heads ----


@pytest.mark.parametrize(("first", "slowly"), [(HEAD, b""), (b"", HEAD * 1000), (b"G", b"")])
async def test_a_head_that_does_not_end_is_cut_off(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, first: bytes, slowly: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", SHORT_S)
    assert await what_came(server, first, slowly) == b""
    await server.idle()


async def test_a_head_has_its_time_again_on_each_request_of_a_connection(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1.5)
    reader, writer = await server.connect()
    for _ in range(4):
        writer.write(b"GET /live HTTP/1.1\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"Host: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /live")
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_long_answer_is_no_slow_head(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", SHORT_S)
    async with server.client() as client:
        call = asyncio.create_task(post(client, TEXT, prompt=[1]))
        started = await server.started()
        await asyncio.sleep(3 * SHORT_S)
        started.say([97], Finish.LENGTH)
        assert (await call)["choices"][0]["text"] == "a"


# ---- bodies ----


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"])
@pytest.mark.parametrize("slowly", [b"", b'{"prompt":' * 100])
async def test_a_body_that_trickles_is_a_408(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, framing: bytes, slowly: bytes
) -> None:
    monkeypatch.setattr(body, "GRACE_S", SHORT_S)
    reader, writer = await server.connect()
    writer.write(HEAD + framing)
    sending = asyncio.create_task(trickle(writer, slowly))
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        error = msgspec.json.decode(await reader.readuntil(b"}}"))["error"]
    sending.cancel()
    writer.transport.abort()
    assert b" 408 " in head.split(b"\r\n")[0]
    assert (error["code"], error["type"]) == ("slow_body", "invalid_request_error")
    await server.idle()


async def test_a_steady_body_has_the_time_it_needs(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "GRACE_S", 1.0)
    monkeypatch.setattr(body, "MIN_BYTES_PER_S", 1000)
    reader, writer = await server.connect()
    text = b'{"prompt":[1]}'.ljust(4000)
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(text))
    for at in range(0, len(text), 200):
        writer.write(text[at : at + 200])
        await asyncio.sleep(SHORT_S)
    (await server.started()).say([97], Finish.LENGTH)
    assert b" 200 " in await reader.readline()
    writer.transport.abort()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_the_limit_is_read_and_one_byte_more_is_a_413(server: LocalServer, chunked: bool) -> None:
    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    async with server.client() as client:
        for size in (LIMIT - 1, LIMIT):
            data = b'{"prompt":[1]}'.ljust(size)
            call = asyncio.create_task(client.post(TEXT, data=pieces(data) if chunked else io.BytesIO(data)))
            (await server.started()).say([97], Finish.LENGTH)
            async with await call as response:
                assert response.status == 200
        data = b'{"prompt":[1]}'.ljust(LIMIT + 1)
        error = await refusal(client, TEXT, 413, data=pieces(data) if chunked else io.BytesIO(data))
        assert error["code"] == "body_too_large"
    await server.idle()


async def test_a_huge_length_is_refused_before_a_byte_of_it_came(server: LocalServer) -> None:
    reader, writer = await server.connect()
    writer.write(HEAD + b"Content-Length: 99999999999\r\n\r\n")
    assert b" 413 " in await reader.readline()
    writer.transport.abort()


# ---- what is no HTTP ----


@pytest.mark.parametrize(
    "data",
    [
        b"no http at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",  # TLS on a plain port
        b"GET /live HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: nine\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nlong: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_api_s_shape(server: LocalServer, data: bytes) -> None:
    status, code = error_of(await what_came(server, data, b""))
    assert b" 400 " in status
    assert code == "bad_http"
    async with server.client() as client, client.get("/live") as response:
        assert response.status == 200


async def test_a_connection_that_ends_anywhere_is_forgotten(server: LocalServer) -> None:
    whole = HEAD + b"Content-Length: 14\r\n\r\n" + b'{"prompt":[1]}'
    for at in range(0, len(whole), 5):
        reader, writer = await server.connect()
        writer.write(whole[:at])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        del reader
    await until(lambda: server.buffered() == [])
    async with aiohttp.ClientSession(server.address) as client, client.get("/live") as response:
        assert response.status == 200
    await server.idle()
