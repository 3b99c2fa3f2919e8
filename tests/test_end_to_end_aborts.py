"""Clients that leave, streaming or not, in every phase of a request: nothing they held stays held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from server.rank import REQUESTS_AHEAD
from tests.byte_tokenizer import write_model
from tests.serving import RunningServer, eventually

# Steps of 2 ms and 5,000 prompt tokens a second: long prompts prefill for a second, long answers decode for many.
SLOW = {"DEEPINFER_FAKE_STEP_MS": "2", "DEEPINFER_FAKE_PREFILL_TOKENS_PER_S": "5000"}
RANKS, RUNNING = 2, 8
GIVEN = RANKS * (RUNNING + REQUESTS_AHEAD)  # requests that the ranks are given before the next ones wait in the line
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
LONG = 7000  # prompt tokens

# Clients that leave in each phase.
FEW, MANY = 17, 167
# Of the test for memory: connections at once, aborts before the first look at the memory and between the looks.
AT_ONCE, WARM_UP, COUNTED = 50, 2000, 20_000
BYTES_PER_ABORT = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("aborts") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    # Requests are alike, so affinity would take them for one conversation and leave a rank some places emptier.
    flags = ["--dp", str(RANKS), "--max-num-seqs", str(RUNNING), "--max-num-batched-tokens", "256"]
    flags += ["--routing", "least-loaded"]
    with RunningServer(model, *flags, environ=SLOW) as running:
        yield running


class Client:
    """A connection with one request on it, which leaves without a word."""

    def __init__(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    async def send(
        cls, server: RunningServer, *, stream: bool, prompt_tokens: int = 3, max_tokens: int = 8000, part: float = 1.0
    ) -> Client:
        """Send the first `part` of a request."""
        url = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        fields = {"prompt": [1] * prompt_tokens, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
        body = json.dumps(fields).encode()
        data = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(data[: int(len(data) * part)])
        await writer.drain()
        return cls(writer, reader)

    async def read_until(self, mark: bytes) -> None:
        await self._reader.readuntil(mark)

    def leave(self) -> None:
        self._writer.transport.abort()


async def crowd(server: RunningServer, count: int, **request: Any) -> list[Client]:
    """That many clients, every second one of a stream."""
    return list(
        await asyncio.gather(*(Client.send(server, stream=number % 2 == 0, **request) for number in range(count)))
    )


def leave(clients: list[Client]) -> None:
    for client in clients:
        client.leave()


async def until(condition: Callable[[], bool], what: str) -> None:
    """`serving.eventually` that lets the test's own connections move."""
    await asyncio.to_thread(eventually, condition, what)


async def placed(server: RunningServer, count: int) -> None:
    """Until so many are with the ranks or in a line; which of the two is a matter of timing at the border."""
    await until(lambda: server.metric("slots_used") + server.metric("line_requests") == count, f"{count} are placed")


# ---- the phases: each has `count` clients leave in it ----


async def parsing(server: RunningServer, count: int) -> None:
    """With some part of the request sent."""
    for number in range(count):
        leave([await Client.send(server, stream=True, part=(number + 1) / (count + 1))])


async def in_the_line(server: RunningServer, count: int) -> None:
    """Before a rank was told of them."""
    running = await crowd(server, GIVEN)
    await placed(server, GIVEN)
    waiting = await crowd(server, count)
    await placed(server, GIVEN + count)
    leave(waiting)
    leave(running)


async def in_the_engine(server: RunningServer, count: int) -> None:
    """Given to a rank, the first half running and the other waiting there."""
    for at in range(0, count, GIVEN):
        clients = await crowd(server, min(GIVEN, count - at))
        await placed(server, len(clients))
        leave(clients)
        await until(lambda: server.metric("slots_used") == 0, "all are gone")


async def prefilling(server: RunningServer, count: int) -> None:
    """A prompt above what a rank takes ahead goes alone, so one a rank."""
    for at in range(0, count, RANKS):
        clients = await crowd(server, min(RANKS, count - at), prompt_tokens=LONG)
        await placed(server, len(clients))
        leave(clients)
        await until(lambda: server.metric("slots_used") == 0, "all are gone")


async def decoding(server: RunningServer, count: int) -> None:
    """After the first token; those that wait for a whole answer in the same batch."""
    for at in range(0, count, RANKS * RUNNING):
        clients = await crowd(server, min(RANKS * RUNNING, count - at))
        await asyncio.gather(*(client.read_until(b"data: {") for client in clients[::2]))
        leave(clients)
        await until(lambda: server.metric("slots_used") == 0, "all are gone")


async def finishing(server: RunningServer, count: int) -> None:
    """With the last token on its way, or the head of the whole answer."""
    for at in range(0, count, RANKS * RUNNING):
        clients = await crowd(server, min(RANKS * RUNNING, count - at), max_tokens=3)
        marks = [b'"text":', b"HTTP/1.1 200 OK"]
        await asyncio.gather(*(client.read_until(marks[place % 2]) for place, client in enumerate(clients)))
        leave(clients)


PHASES = [parsing, in_the_line, in_the_engine, prefilling, decoding, finishing]


async def check_all_gone(server: RunningServer) -> None:
    """Every gauge is back at zero, each request was counted once, and the server answers."""
    await asyncio.to_thread(server.wait_idle)
    await until(lambda: server.metric("line_requests") == server.metric("pending_prompt_tokens") == 0, "nobody waits")

    def all_counted() -> bool:
        ended = server.metric("aborted_total") + server.metric("finished_total")
        return server.metric("requests_total") == ended

    await until(all_counted, "each request was counted once")
    assert server.metric("errors_total") == 0
    assert "Traceback" not in server.log()
    async with (
        aiohttp.ClientSession(server.address) as client,
        client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}) as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
async def test_clients_that_leave_in_a_phase_leave_nothing(
    server: RunningServer, phase: Callable[[RunningServer, int], Awaitable[None]], count: int
) -> None:
    before = server.metric("aborted_total")
    await phase(server, count)
    await check_all_gone(server)
    aborted = server.metric("aborted_total") - before
    if phase is decoding:
        assert aborted == count
    else:
        # In the line they were not accepted yet, and the first may get a turn while others leave.
        assert aborted <= count + (GIVEN if phase is in_the_line else 0)


@pytest.mark.soak
async def test_an_abort_leaves_no_memory_behind(model: Path) -> None:
    with RunningServer(model, "--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "1024") as server:
        process = psutil.Process(server.pid)

        async def abort(count: int) -> int:
            """Have so many leave; returns the memory after it, in bytes, without the rings and the host pool.

            Those have one size for ever, but count only from the first byte in each of their pages on.
            """
            for _ in range(0, count, AT_ONCE):
                clients = await crowd(server, AT_ONCE)
                await asyncio.gather(*(client.read_until(b"data: {") for client in clients[::2]))
                leave(clients)
            await check_all_gone(server)
            memory = process.memory_info()
            return memory.rss - memory.shared

        before = await abort(WARM_UP)
        after = await abort(COUNTED)
        assert after - before < COUNTED * BYTES_PER_ABORT


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
    await check_all_gone(server)
    assert server.metric("aborted_total") == before + 8


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
            await leaving.read_until(b"data: {")
            answers = [asyncio.create_task(text()) for _ in range(2)]
            leaving.leave()
            assert [await answer for answer in answers] == [alone, alone]
    await asyncio.to_thread(server.wait_idle)
