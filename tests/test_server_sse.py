"""Streams to readers that are slow, stalled or waiting: kept alive, bounded in memory, cut off once they are gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec
import pytest

from ipc.messages import Finish
from server import connection, sse
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.http_calls import TEXT
from tests.local_server import LocalServer, Started, local_server
from tests.rank_pair import until
from tests.stalled_client import stalled_client

STALLED: Final = 50
GOOD: Final = 8
SEND_BUFFER: Final = 16384  # so that a client that does not read is noticed after a hundred events
ROUND: Final = 32  # tokens a request in one batch
ROUNDS: Final = 40
# An event of this model is some 170 bytes; what one round adds to a connection that was below the mark.
ROUND_BYTES: Final = ROUND * 250


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("sse") / "tiny"))


@pytest.fixture
async def server(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalServer]:
    monkeypatch.setattr(connection, "SEND_BUFFER", SEND_BUFFER)
    async with local_server(tokenizer, seqs=STALLED + GOOD) as running:
        yield running


async def read_text(response: aiohttp.ClientResponse) -> str:
    """All of a stream's text; it must end well."""
    *events, done, nothing = (await response.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    chunks = [msgspec.json.decode(one.removeprefix(b"data: ")) for one in events if not one.startswith(b":")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def talk(server: LocalServer, requests: list[Started]) -> int:
    """Rounds of tokens for all, each once the last was taken; returns the most that any connection held back."""
    most = 0
    for _ in range(ROUNDS):
        for started in requests:
            started.say([97] * ROUND)
        await until(lambda: server.pairs[0].server.depth().records == 0)
        most = max(most, *server.buffered())
    return most


async def test_readers_that_stall_are_cut_off_and_counted_while_others_flow(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_TIMEOUT_S", 0.5)
    with contextlib.ExitStack() as closing:
        stalled = [closing.enter_context(stalled_client(server.port)) for _ in range(STALLED)]
        silent = [await server.started() for _ in stalled]
        async with server.client() as client:
            calls = [asyncio.create_task(client.post(TEXT, json={"prompt": [2], "stream": True})) for _ in range(GOOD)]
            good = [await server.started() for _ in calls]
            texts = [asyncio.create_task(read_text(await response)) for response in await first_tokens(calls, good)]
            most = await talk(server, [*silent, *good])
            for started in good:
                started.say([98], Finish.LENGTH)
            for text in texts:
                assert await text == "a" * (1 + ROUND * ROUNDS) + "b"
        await server.idle()
        await until(lambda: server.metric("stalled_readers_total") == STALLED)
    assert most <= sse.HIGH_WATER + ROUND_BYTES
    assert len(server.cancels) == STALLED
    assert (server.metric("aborted_total"), server.metric("finished_total")) == (STALLED, GOOD)
    assert server.metric("errors_total") == 0


async def first_tokens(
    calls: list[asyncio.Task[aiohttp.ClientResponse]], requests: list[Started]
) -> list[asyncio.Task[aiohttp.ClientResponse]]:
    """A response begins with its first token."""
    for started in requests:
        started.say([97])
    await asyncio.wait(calls)
    return calls


async def test_a_slow_reader_gets_everything(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_TIMEOUT_S", 5.0)
    slow = stalled_client(server.port)
    slow.setblocking(False)
    started = await server.started()
    loop, received = asyncio.get_running_loop(), bytearray()
    most = await talk(server, [started])
    started.say([98], Finish.LENGTH)
    with contextlib.closing(slow):
        while not received.endswith(b"0\r\n\r\n"):
            received += await loop.sock_recv(slow, 16384)
            await asyncio.sleep(0)
    assert received.count(b'"text":"a"') == ROUND * ROUNDS
    assert received.count(b'"text":"b"') == 1
    assert most <= sse.HIGH_WATER + ROUND_BYTES
    assert server.metric("stalled_readers_total") == 0
    await server.idle()


async def test_a_silent_stream_is_kept_alive_by_comments(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.03)
    async with server.client() as client, client.post(TEXT, json={"prompt": [1], "stream": True}) as response:
        assert response.status == 200, "opened by a comment, long before the first token"
        started = await server.started()
        for at in range(3):
            assert await response.content.readuntil(b"\n\n") == sse.COMMENT
            assert server.pairs[0].server.depth().records == 0
            if at == 1:
                started.say([97])
                while (event := await response.content.readuntil(b"\n\n")) == sse.COMMENT:
                    pass
                assert b'"text":"a"' in event
        started.say([98], Finish.LENGTH)
        assert await read_text(response) == "b"
    await server.idle()


async def test_a_failure_behind_a_comment_is_an_event(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.03)
    async with server.client() as client, client.post(TEXT, json={"prompt": [1], "stream": True}) as response:
        assert response.status == 200
        (await server.started()).end(Finish.ERROR)
        *_, error, done, nothing = (await response.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "engine_error"


async def test_comments_to_a_client_that_left_do_no_harm(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    for _ in range(30):
        reader, writer = await server.connect()
        body = b'{"prompt":[1],"stream":true}'
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXT.encode(), len(body)) + body)
        await server.started()
        writer.transport.abort()
        del reader
    await server.idle()
    assert "exception" not in caplog.text.lower()
