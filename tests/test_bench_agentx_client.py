"""The client: what counts as a first token, which usage is read, and a kind for everything that can go wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest

from bench.agentx.client import Answer, Client
from bench.agentx.errors import TargetError

HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n"
TIMEOUT_S: Final = 20.0


def chunk(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return b"data: " + msgspec.json.encode({"object": "chat.completion.chunk", "choices": choices, **fields}) + b"\n\n"


TEXT: Final = chunk({"content": "a"})
USAGE: Final = chunk(usage={"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}})


@asynccontextmanager
async def server_of(pieces: Sequence[bytes | asyncio.Event]) -> AsyncIterator[str]:
    """Answers every request with these bytes; an event among them is waited for."""

    handlers: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = (line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(next(lengths, 0)))
            for piece in pieces:
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                else:
                    writer.write(piece)
                    await writer.drain()
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def ask(*pieces: bytes | asyncio.Event, timeout_s: float = TIMEOUT_S) -> Answer:
    async with server_of(pieces) as url, Client(url, timeout_s=timeout_s) as client:
        return await client.chat({"messages": [], "stream": True}, {})


async def test_an_answer_is_timed_and_counted() -> None:
    role = chunk({"role": "assistant", "content": ""})
    answer = await ask(HEAD, b": keep-alive\n\n", role, TEXT, TEXT.replace(b"\n", b"\r\n"), USAGE, DONE)
    assert (answer.error, answer.detail) == ("", "")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (9, 4, 2)
    assert answer.first is not None
    assert answer.last is not None
    assert answer.ended is not None
    assert answer.started < answer.first <= answer.last <= answer.ended


async def test_the_first_token_is_the_first_text_not_the_role() -> None:
    """A text that is held back until the client has read the role: only then may the first token count."""
    gate = asyncio.Event()
    async with server_of([HEAD, chunk({"role": "assistant", "content": ""}), gate, TEXT, gate, USAGE, DONE]) as url, \
            Client(url) as client:  # fmt: skip
        asking = asyncio.create_task(client.chat({}, {}))
        await asyncio.sleep(0.05)
        opened = time.perf_counter()
        gate.set()
        answer = await asking
    assert answer.first is not None
    assert answer.first > opened


async def test_tokens_without_text_come_with_the_last_chunk() -> None:
    answer = await ask(HEAD, chunk({"role": "assistant"}), chunk({}), USAGE, DONE)
    assert (answer.error, answer.completion_tokens) == ("", 2)
    assert answer.first == answer.last is not None


@pytest.mark.parametrize(
    "delta",
    [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}],
)
async def test_text_of_any_sort_is_text(delta: dict[str, Any]) -> None:
    assert (await ask(HEAD, chunk(delta), USAGE, DONE)).error == ""


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_cache_hit_tokens": 3}, 3),
        ({"prompt_tokens_details": None}, 0),
        ({"prompt_tokens_details": {"cached_tokens": None}}, 0),
        ({"prompt_tokens_details": {"audio_tokens": 0}}, 0),
    ],
)
async def test_cached_tokens_are_found_in_any_spelling(usage: dict[str, Any], cached: int) -> None:
    answer = await ask(HEAD, TEXT, chunk(usage={"prompt_tokens": 5, "completion_tokens": 1, **usage}), DONE)
    assert (answer.error, answer.cached_tokens) == ("", cached)


@pytest.mark.parametrize(
    ("pieces", "error", "detail"),
    [
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"], "http 503", "full"),
        ([HEAD, TEXT, b'event: error\ndata: {"error": {"message": "rank lost"}}\n\n'], "error event", "rank lost"),
        ([HEAD, TEXT, USAGE], "no end of stream", ""),
        ([HEAD, TEXT, DONE], "no usage", ""),
        ([HEAD, chunk(usage={"completion_tokens": 2}), DONE], "no token", ""),
        ([HEAD, chunk({"content": ""}), chunk(usage={"prompt_tokens": 2}), DONE], "no token", ""),
        ([HEAD, b"data: {oops\n\n"], "bad event", ""),
        ([HEAD.replace(b"Connection: close", b"Content-Length: 999"), TEXT], "broken connection", ""),
        ([b""], "broken connection", ""),
    ],
)
async def test_what_goes_wrong_has_a_kind(pieces: list[bytes], error: str, detail: str) -> None:
    answer = await ask(*pieces)
    assert answer.error == error
    assert detail in answer.detail
    assert answer.ended is not None


async def test_a_server_that_stands_still_is_a_timeout() -> None:
    answer = await ask(HEAD, TEXT, asyncio.Event(), timeout_s=0.2)
    assert answer.error == "timeout"
    assert answer.ended is not None


async def test_events_are_found_wherever_the_bytes_are_cut() -> None:
    whole = TEXT + b": comment\n\n" + chunk({"content": "é\n"}) + USAGE + DONE
    for at in range(0, len(whole), 7):
        answer = await ask(HEAD + whole[:at], whole[at:])
        assert (answer.error, answer.prompt_tokens) == ("", 9), at


async def test_nobody_there_is_no_connection() -> None:
    async with server_of([]) as url:
        pass
    async with Client(url) as client:
        assert (await client.chat({}, {})).error == "no connection"
        with pytest.raises(TargetError, match=rf"--url {url}: {url}/v1/models does not answer"):
            await client.models()


def whole(body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]


@pytest.mark.parametrize(
    ("body", "ranks"), [(b'{"status": "ok", "total_ranks": 3}', 3), (b"{}", 1), (b"", 1), (b'{"total_ranks": "x"}', 1)]
)
async def test_ranks_are_those_that_the_server_tells(body: bytes, ranks: int) -> None:
    async with server_of(whole(body)) as url, Client(url) as client:
        assert await client.ranks() == ranks
    async with Client(url) as client:
        assert await client.ranks() == 1  # nobody is there any more


async def test_models_are_listed_with_their_context() -> None:
    body = b'{"object": "list", "data": [{"id": "m", "max_model_len": 8192}, {"id": "n"}]}'
    async with server_of(whole(body)) as url, Client(url + "/v1/") as client:
        assert [(one.id, one.max_model_len) for one in await client.models()] == [("m", 8192), ("n", None)]
    for wrong, why in ((b"[]", "no list of models"), (b'{"data": []}', "lists no model")):
        async with server_of(whole(wrong)) as url, Client(url) as client:
            with pytest.raises(TargetError, match=why):
                await client.models()
