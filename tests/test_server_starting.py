"""A server that loads its tokenizer: it lives, is not ready, says so at once, and hands its socket over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from server.connection import serve
from server.starting import starting
from tests.http_calls import CHAT, HELLO, refusal


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"http://{host}:{port}"


async def test_it_lives_and_is_not_ready(listener: socket.socket) -> None:
    async with starting(listener, None, 16), aiohttp.ClientSession(address_of(listener)) as client:
        for path, status, told in (("/live", 200, "ok"), ("/health", 503, "loading")):
            async with client.get(path) as answer:
                assert (answer.status, (await answer.json())["status"]) == (status, told)
        error = await refusal(client, CHAT, 503, json={"messages": HELLO})
        assert error["code"] == "not_ready"
        long = {"messages": [{"role": "user", "content": "x" * 2**19}]}
        assert (await refusal(client, CHAT, 503, json=long))["code"] == "not_ready"


async def test_who_comes_between_is_served_by_the_next(listener: socket.socket) -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/live", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    async with aiohttp.ClientSession(address_of(listener)) as client:
        async with starting(listener, None, 16), client.get("/live") as answer:
            assert await answer.json() == {"status": "ok"}
        early = asyncio.create_task(client.get("/live"))  # nobody accepts now; it waits in the queue
        await asyncio.sleep(0.05)
        assert not early.done()
        server = await serve(runner, listener, None, 16)
        async with await early as answer:
            assert await answer.text() == "hello"
    server.close()
    await runner.cleanup()


async def test_a_client_that_says_nothing_holds_nothing_up(listener: socket.socket) -> None:
    async with starting(listener, None, 16):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
