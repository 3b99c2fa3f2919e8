"""Clients that leave: streaming or not, queued, prefilling or decoding, nothing they held stays held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.byte_tokenizer import write_model
from tests.serving import RunningServer, eventually

CLIENTS = 100
# Steps of 2 ms and 5,000 prompt tokens a second: long prompts prefill for a second, long answers decode for many.
SLOW = {"DEEPINFER_FAKE_STEP_MS": "2", "DEEPINFER_FAKE_PREFILL_TOKENS_PER_S": "5000"}
RUNNING = 8
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("aborts") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    flags = ["--dp", "2", "--max-num-seqs", str(RUNNING), "--max-num-batched-tokens", "256"]
    with RunningServer(model, *flags, environ=SLOW) as running:
        yield running


class Client:
    """A connection with one request on it, which leaves without a word."""

    def __init__(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    async def send(cls, server: RunningServer, *, stream: bool, prompt_tokens: int = 3) -> Client:
        url = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps({"prompt": [1] * prompt_tokens, "stream": stream, **ENDLESS}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        return cls(writer, reader)

    async def first_token(self) -> None:
        await self._reader.readuntil(b"data: {")

    def leave(self) -> None:
        self._writer.transport.abort()


async def until(condition: Callable[[], bool], what: str) -> None:
    """`serving.eventually` that lets the test's own connections move."""
    await asyncio.to_thread(eventually, condition, what)


async def check_all_gone(server: RunningServer, aborted_before: float, left: int = CLIENTS) -> None:
    """Every gauge is back at zero, each client was counted once, and the server answers."""
    await asyncio.to_thread(server.wait_idle)
    await until(lambda: server.metric("aborted_total") == aborted_before + left, "every client was counted")
    assert server.metric("errors_total") == 0
    assert server.metric("requests_total") == server.metric("aborted_total") + server.metric("finished_total")
    async with (
        aiohttp.ClientSession(server.address) as client,
        client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}) as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["usage"]["completion_tokens"] >= 1


async def test_clients_that_leave_while_decoding(server: RunningServer) -> None:
    before = server.metric("aborted_total")
    for _ in range(CLIENTS // 10):
        clients = await asyncio.gather(*(Client.send(server, stream=True) for _ in range(10)))
        await asyncio.gather(*(client.first_token() for client in clients))
        for client in clients:
            client.leave()
    await check_all_gone(server, before)


async def test_clients_that_leave_while_queued_and_running(server: RunningServer) -> None:
    before = server.metric("aborted_total")
    clients = await asyncio.gather(*(Client.send(server, stream=number % 2 == 0) for number in range(CLIENTS)))
    await until(lambda: server.metric("slots_used") == CLIENTS, "all are placed")
    await until(lambda: server.metric("num_requests_running") == 2 * RUNNING, "the ranks are full")
    await until(lambda: server.metric("num_requests_waiting") == CLIENTS - 2 * RUNNING, "the rest waits in the ranks")
    for client in clients:
        client.leave()
    await check_all_gone(server, before)


async def test_clients_that_leave_while_prefilling(server: RunningServer) -> None:
    before = server.metric("aborted_total")
    sent = (Client.send(server, stream=number % 2 == 0, prompt_tokens=7000) for number in range(CLIENTS))
    clients = await asyncio.gather(*sent)
    await until(lambda: server.metric("slots_used") == CLIENTS, "all are placed")
    await until(lambda: server.metric("num_requests_running") > 0, "some prefill")
    for client in clients:
        client.leave()
    await check_all_gone(server, before)


async def test_clients_of_whole_answers_that_leave(server: RunningServer) -> None:
    before = server.metric("aborted_total")
    clients = await asyncio.gather(*(Client.send(server, stream=False) for _ in range(2 * RUNNING)))
    await until(lambda: server.metric("num_requests_running") == 2 * RUNNING, "all run")
    for client in clients:
        client.leave()
    await check_all_gone(server, before, left=2 * RUNNING)


async def test_a_client_that_leaves_with_many_prompts_frees_them_all(server: RunningServer) -> None:
    before = server.metric("aborted_total")
    for stream in (True, False):
        async with aiohttp.ClientSession(server.address) as client:
            body = {"prompt": [[1], [2], [3], [4]], "stream": stream, **ENDLESS}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: server.metric("slots_used") == 4, "all prompts are placed")
            request.cancel()
            await asyncio.wait([request])
            if not request.cancelled():
                request.result().close()
        await asyncio.to_thread(server.wait_idle)
    await check_all_gone(server, before, left=8)


async def test_clients_that_leave_never_reach_the_next_request(server: RunningServer) -> None:
    """Late tokens of those that left must not show in the answers that reuse their slots."""
    async with aiohttp.ClientSession(server.address) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}

        async def text() -> str:
            async with client.post("/v1/completions", json=body) as answer:
                found = await answer.json()
            assert found["usage"]["completion_tokens"] == 30
            return str(found["choices"][0]["text"])

        alone = await text()
        for _ in range(10):
            leaving = await Client.send(server, stream=True)
            await leaving.first_token()
            answers = [asyncio.create_task(text()) for _ in range(2)]
            leaving.leave()
            assert [await answer for answer in answers] == [alone, alone]
    await asyncio.to_thread(server.wait_idle)
