"""Answers over HTTP from an engine that says what the test wants: fast and slow way, n, stop strings, deadlines."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
import pytest

from ipc.messages import Cancel, Finish, Submit
from server.tokenizer.load import TextTokenizer, load
from server.tokenizer.stops import before_stop
from tests.byte_tokenizer import EOS, write_model
from tests.http_calls import CHAT, HELLO, TEXT, post, refusal, stream
from tests.local_server import LocalServer, Started, ids_of, local_server
from tests.rank_pair import until

PROMPTS: Final[dict[str, dict[str, Any]]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": [1, 2, 3]}}
# A text of several alphabets, cut anywhere, with an end that is half a character.
IDS: Final = [*"plain, “quoted”, 日本語 \n\t\\ 🙂 end".encode(), 0xE2, 0x82]
NEVER: Final = ["☃"]  # a stop string that makes the server look for it and is not there


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("answer") / "tiny"))


@pytest.fixture
async def server(tokenizer: TextTokenizer) -> AsyncIterator[LocalServer]:
    async with local_server(tokenizer) as running:
        yield running


def cut(ids: Sequence[int], seed: int) -> list[list[int]]:
    """The ids in batches of one to five."""
    sizes, rest, found = random.Random(seed), list(ids), []
    while rest:
        size = sizes.randint(1, 5)
        found.append(rest[:size])
        rest = rest[size:]
    return found


async def answer(started: Started, batches: Sequence[Sequence[int]], finish: Finish) -> None:
    """Say the batches one after the other, each once the last was taken off the ring."""
    for number, batch in enumerate(batches, 1):
        started.say(batch, finish if number == len(batches) else Finish.NONE)
        await until(lambda: started.pair.server.depth().records == 0)


async def streamed(server: LocalServer, path: str, batches: list[list[int]], finish: Finish, **body: Any) -> bytes:
    """The bytes of a streamed answer, without what differs from call to call."""
    async with server.client(headers={"X-Request-ID": "same"}) as client:
        request = client.post(path, json={**PROMPTS[path], **body, "stream": True})
        call = asyncio.create_task(request.__aenter__())
        await answer(await server.started(), batches, finish)
        async with await call as response:
            assert response.status == 200
            return re.sub(rb'"created":\d+', b'"created":0', await response.read())


def events(data: bytes) -> list[dict[str, Any]]:
    """Its chunks; the stream must be whole."""
    *found, done, nothing = data.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in found]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What a choice's chunks add up to, chat or text."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def several(server: LocalServer, count: int) -> list[Started]:
    return [await server.started() for _ in range(count)]


# ---- the fast way and the slow way ----


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("ending", "finish"), [([], Finish.LENGTH), ([EOS], Finish.STOP)])
async def test_the_fast_and_the_slow_way_write_the_same_bytes(
    server: LocalServer, path: str, ending: list[int], finish: Finish
) -> None:
    ids = [*IDS, *ending]
    fast = await streamed(server, path, cut(ids, 1), finish)
    for seed in (2, 3):
        assert await streamed(server, path, cut(ids, seed), finish) == fast
        assert await streamed(server, path, cut(ids, seed), finish, stop=NEVER) == fast
    assert await streamed(server, path, [ids], finish, stop=NEVER) == fast
    chunks = events(fast)
    assert text_of(chunks) == bytes(IDS).decode(errors="replace")
    with_logprobs = events(await streamed(server, path, cut(ids, 4), finish, logprobs=True if path == CHAT else 0))
    with_usage = events(
        await streamed(server, path, cut(ids, 5), finish, stream_options={"continuous_usage_stats": True})
    )
    for found in (with_logprobs, with_usage):
        assert text_of(found) == text_of(chunks)
        assert found[-1]["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"]
    # A chunk may hold several tokens' worth of a chat's text, so its counts only grow; the last one has them all.
    counts = [chunk["usage"]["completion_tokens"] for chunk in with_usage if "usage" in chunk]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    if path == TEXT:
        assert counts == list(range(1, len(ids) + 1))


async def test_stop_strings_are_the_same_streamed_and_whole(server: LocalServer) -> None:
    draw = random.Random(6)
    for _ in range(25):
        ids = list("".join(draw.choices(["a", "b", "ab", "日", "🙂"], k=draw.randint(1, 12))).encode())
        stops = ["".join(draw.choices("ab日🙂", k=draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
        batches = cut(ids, draw.randint(0, 99))
        expected = before_stop(bytes(ids).decode(), stops)
        reason = "stop" if any(stop in bytes(ids).decode() for stop in stops) else "length"
        chunks = events(await streamed(server, TEXT, batches, Finish.LENGTH, stop=stops))
        assert (text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]) == (expected, reason)
        async with server.client() as client:
            call = asyncio.create_task(post(client, TEXT, prompt=[1], stop=stops))
            started = await server.started()
            await answer(started, batches, Finish.LENGTH)
            choice = (await call)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, reason)
    await server.idle()


async def test_a_stop_string_cancels_the_rest_and_counts_what_was_used(server: LocalServer) -> None:
    async with server.client() as client:
        options = {"include_usage": True}
        call = asyncio.create_task(stream(client, TEXT, prompt=[1], stop="b", min_tokens=2, stream_options=options))
        started = await server.started()
        assert started.submit.min_tokens == 2
        started.say(list(b"bbabcd"))
        *chunks, usage = await call
    assert text_of(chunks) == "bba"
    assert usage["usage"]["completion_tokens"] == 4
    await server.idle()
    assert [Cancel(started.submit.slot, started.submit.generation)] == server.cancels


# ---- n ----


async def test_n_answers_draw_from_seeds_of_their_own_and_share_a_prompt(server: LocalServer) -> None:
    async with server.client() as client:
        call = asyncio.create_task(post(client, CHAT, messages=HELLO, n=3, seed=2**63 - 1))
        started = await several(server, 3)
        assert [one.submit.sampling.seed for one in started] == [2**63 - 1, 2**63, 2**63 + 1]
        for letter, one in zip("abc", started, strict=True):
            one.say(list(letter.encode() * 2), Finish.LENGTH)
        whole = await call
    assert [(one["index"], one["message"]["content"]) for one in whole["choices"]] == [(0, "aa"), (1, "bb"), (2, "cc")]
    assert whole["usage"]["prompt_tokens"] == len(ids_of(started[0]))
    assert whole["usage"]["completion_tokens"] == 6


async def test_streamed_answers_interleave_by_index_and_the_usage_is_of_all(server: LocalServer) -> None:
    async with server.client() as client:
        body = {"prompt": [[1], [2, 3]], "n": 2, "stream_options": {"include_usage": True}}
        call = asyncio.create_task(stream(client, TEXT, **body))
        started = await several(server, 4)
        assert [ids_of(one) for one in started] == [[1], [1], [2, 3], [2, 3]]
        assert len({one.submit.sampling.seed for one in started}) == 2  # a seed a choice, the same for each prompt
        for number in (3, 0, 2, 1):
            started[number].say([ord("a") + number])
        for number in (2, 3, 1, 0):
            started[number].say([ord("A") + number], Finish.LENGTH)
        *chunks, usage = await call
    assert [text_of(chunks, index) for index in range(4)] == ["aA", "bB", "cC", "dD"]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2, 3]
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 8)


async def test_one_failed_answer_ends_the_whole_request(server: LocalServer) -> None:
    async with server.client() as client:
        call = asyncio.create_task(client.post(TEXT, json={"prompt": [1], "n": 3, "stream": True}))
        started = await several(server, 3)
        for one in started:
            one.say([97])
        response = await call
        assert await response.content.readuntil(b"\n\n")
        started[1].end(Finish.ERROR)
        *_, error, done, nothing = (await response.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "engine_error"
    await server.idle()
    others = {(one.submit.slot, one.submit.generation) for one in (started[0], started[2])}
    assert {(cancel.slot, cancel.generation) for cancel in server.cancels} == others


async def test_too_many_answers_are_refused_by_name(server: LocalServer) -> None:
    async with server.client() as client:
        error = await refusal(client, TEXT, 400, json={"prompt": [[1]] * 3, "n": 128})
        assert error["param"] == "n"
        assert (await refusal(client, TEXT, 400, json={"prompt": [1], "n": 129}))["param"] == "n"
    await server.idle()


# ---- deadlines, failures and clients that leave ----


async def test_a_request_that_takes_too_long_is_a_504_or_an_error_event(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, request_timeout=0.2) as server, server.client() as client:
        for streaming in (True, False):
            error = await refusal(client, TEXT, 504, json={"prompt": [1], "stream": streaming})
            assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
        await server.idle()
        for _ in range(2):
            await server.started()
        call = asyncio.create_task(client.post(TEXT, json={"prompt": [2], "stream": True}))
        (await server.started()).say([97])
        async with await call as response:
            assert response.status == 200
            first, error_event, done, nothing = (await response.read()).split(b"\n\n")
        assert b'"text":"a"' in first
        assert msgspec.json.decode(error_event.removeprefix(b"data: "))["error"]["code"] == "request_timeout"
        assert (done, nothing) == (b"data: [DONE]", b"")
        await server.idle()
        assert len(server.cancels) == 3
        assert (server.metric("errors_total"), server.metric("aborted_total")) == (3, 0)
        assert server.metric("refused_total", code="request_timeout") == 2


@pytest.mark.parametrize("body", [{}, {"stop": NEVER}, {"n": 3}, {"logprobs": 1}, {"stream": False}])
async def test_a_client_that_leaves_ends_its_request_in_the_engine(server: LocalServer, body: dict[str, Any]) -> None:
    count = body.get("n", 1)
    async with server.client() as client:
        call = asyncio.create_task(client.post(TEXT, json={"prompt": [1], "stream": True, **body}))
        started = await several(server, count)
        for one in started:
            one.say([97])
        if body.get("stream", True):
            response = await call
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            call.cancel()
    await server.idle()
    assert len(server.cancels) == count
    await until(lambda: server.metric("aborted_total") == count)
    assert server.metric("errors_total") == 0


async def test_a_failure_before_the_first_token_has_its_own_status(server: LocalServer) -> None:
    async with server.client() as client:
        call = asyncio.create_task(refusal(client, TEXT, 500, json={"prompt": [1], "stream": True}))
        (await server.started()).end(Finish.ERROR)
        assert (await call)["code"] == "engine_error"


async def test_an_old_client_gets_its_stream_unchunked(server: LocalServer) -> None:
    reader, writer = await server.connect()
    body = b'{"prompt":[1],"stream":true}'
    writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (TEXT.encode(), len(body), body))
    started: Started = await server.started()
    assert isinstance(started.submit, Submit)
    await answer(started, [[97], [98], [99]], Finish.LENGTH)
    head, _, data = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text_of(events(data)) == "abc"
    writer.close()
    await writer.wait_closed()
