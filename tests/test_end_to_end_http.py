"""The HTTP surface over real processes: every endpoint and what a client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.byte_tokenizer import BOS, IM_END, MAX_MODEL_LEN, write_model
from tests.http_calls import CHAT, FIXED, HELLO, HELLO_IDS, TEXT, post, refusal, stream
from tests.serving import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_model(tmp_path_factory.mktemp("http") / "tiny")
    with RunningServer(model, "--dp", "2") as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.address) as session:
        yield session


async def test_a_chat_is_the_same_whole_and_streamed(client: aiohttp.ClientSession) -> None:
    whole = await post(client, CHAT, messages=HELLO, **FIXED)
    assert whole["usage"]["prompt_tokens"] == len(HELLO_IDS)
    assert whole["usage"]["completion_tokens"] == 12
    (choice,) = whole["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    *chunks, usage = await stream(client, CHAT, messages=HELLO, **FIXED, stream_options={"include_usage": True})
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == choice["message"]["content"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


async def test_a_chat_is_the_completion_of_its_rendered_ids(client: aiohttp.ClientSession) -> None:
    chat = await post(client, CHAT, messages=HELLO, **FIXED)
    text = await post(client, TEXT, prompt=HELLO_IDS, **FIXED)
    assert text["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


async def test_a_completion_streams_one_chunk_a_token_and_no_usage_unasked(client: aiohttp.ClientSession) -> None:
    whole = await post(client, TEXT, prompt="hello", **FIXED)
    assert whole["usage"]["prompt_tokens"] == 6  # with <|bos|>
    chunks = await stream(client, TEXT, prompt="hello", **FIXED)
    assert len(chunks) == 12
    assert not any("usage" in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


async def test_many_prompts_answer_by_index_as_each_alone(client: aiohttp.ClientSession) -> None:
    prompts: list[Any] = ["one", [1, 2, 3], "three"]
    alone = [(await post(client, TEXT, prompt=prompt, **FIXED))["choices"][0]["text"] for prompt in prompts]
    whole = await post(client, TEXT, prompt=prompts, **FIXED)
    assert [(one["index"], one["text"]) for one in whole["choices"]] == list(enumerate(alone))
    *chunks, usage = await stream(client, TEXT, prompt=prompts, **FIXED, stream_options={"include_usage": True})
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == dict(enumerate(alone))
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 36


async def test_logprobs_come_in_both_shapes(client: aiohttp.ClientSession) -> None:
    chat = await post(client, CHAT, messages=HELLO, logprobs=True, top_logprobs=2, **FIXED)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 12
    text = await post(client, TEXT, prompt=HELLO_IDS, logprobs=2, **FIXED)
    assert text["choices"][0]["logprobs"]["tokens"] == [entry["token"] for entry in content]
    plain = await post(client, TEXT, prompt=HELLO_IDS, **FIXED)
    assert plain["choices"][0]["logprobs"] is None


async def test_seeded_answers_repeat_and_end_by_themselves(client: aiohttp.ClientSession) -> None:
    sampled = {"messages": HELLO, "seed": 11, "max_completion_tokens": 2000}
    first, again = [await post(client, CHAT, **sampled) for _ in range(2)]
    assert first["choices"] == again["choices"]
    assert first["choices"][0]["finish_reason"] == "stop"
    other = await post(client, CHAT, **{**sampled, "seed": 12})
    assert other["choices"] != first["choices"]


async def test_the_answer_is_lowered_to_what_the_context_leaves(client: aiohttp.ClientSession) -> None:
    body = {**FIXED, "prompt": [1] * (MAX_MODEL_LEN - 5), "max_tokens": 100}
    answer = await post(client, TEXT, **body)
    assert answer["usage"]["completion_tokens"] == 5


async def test_models_are_listed_with_their_context(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", MAX_MODEL_LEN)
    async with client.get("/v1/models/tiny") as answer:
        assert await answer.json() == model
    error = await refusal(client, "/v1/models/meta/other", 404, "GET")
    assert error["code"] == "model_not_found"


async def test_health_and_live(client: aiohttp.ClientSession) -> None:
    async with client.get("/health") as answer:
        health = await answer.json()
        assert answer.status == 200
    assert (health["status"], health["ready_ranks"], health["total_ranks"]) == ("ok", 2, 2)
    assert [rank["state"] for rank in health["ranks"]] == ["ready", "ready"]
    async with client.get("/live") as answer:
        assert await answer.json() == {"status": "ok"}


async def test_metrics_count_what_was_served(server: RunningServer, client: aiohttp.ClientSession) -> None:
    names = ("requests_total", "finished_total", "prompt_tokens_total", "completion_tokens_total")
    before = [server.metric(name) for name in names]
    await post(client, TEXT, prompt=[1, 2, 3], **FIXED)
    after = [server.metric(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 3, 12]
    assert server.metric("rank_ready") == 2
    assert server.metric("time_to_first_token_seconds_count") >= 1
    async with client.get("/metrics") as answer:
        assert answer.status == 404  # benchmark tools scrape that path by themselves


async def test_tokenize_and_detokenize_are_inverse(client: aiohttp.ClientSession) -> None:
    text = "héllo <|im_end|> 🙂"
    ids = (await post(client, "/tokenize", prompt=text))["tokens"]
    assert ids[0] == BOS
    assert IM_END in ids
    assert (await post(client, "/detokenize", tokens=ids[1:])) == {"prompt": text}
    bare = await post(client, "/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
    assert (bare["tokens"], bare["count"], bare["max_model_len"]) == (ids[1:], len(ids) - 1, MAX_MODEL_LEN)
    assert len(bare["token_strs"]) == bare["count"]
    assert (await post(client, "/tokenize", messages=HELLO))["tokens"] == HELLO_IDS
    assert (await post(client, "/detokenize", tokens=[])) == {"prompt": ""}
    assert (await post(client, "/tokenize", prompt="", add_special_tokens=False))["tokens"] == []


async def test_a_request_id_is_echoed_or_replaced(client: aiohttp.ClientSession) -> None:
    for given, kept in (("abc-1.2:3_x", True), ("has space", False), ("x" * 129, False), ('"quoted"', False)):
        async with client.get("/live", headers={"X-Request-ID": given}) as answer:
            assert (answer.headers["X-Request-ID"] == given) is kept
    async with client.post(
        TEXT, json={"prompt": "a", **FIXED, "stream": True}, headers={"X-Request-ID": "s1"}
    ) as answer:
        assert answer.headers["X-Request-ID"] == "s1"
        assert b'"id":"cmpl-s1"' in await answer.read()


async def test_two_requests_without_an_id_get_different_ones(client: aiohttp.ClientSession) -> None:
    answers = [await client.get("/live") for _ in range(2)]
    ids = {answer.headers["X-Request-ID"] for answer in answers}
    for answer in answers:
        answer.release()
    assert len(ids) == 2


async def test_a_connection_is_kept_for_the_next_request(server: RunningServer) -> None:
    url = urlsplit(server.address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    body = json.dumps({"prompt": "x", **FIXED}).encode()
    for bad in (b"", body, b"{", body):
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXT.encode(), len(bad)) + bad)
        head = await reader.readuntil(b"\r\n\r\n")
        assert (b" 200 " in head.splitlines()[0]) == (bad == body)
        assert b"connection: close" not in head.lower()
        (length,) = (line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length"))
        assert msgspec.json.decode(await reader.readexactly(int(length)))
    writer.close()
    await writer.wait_closed()


async def test_the_end_of_sequence_id_is_no_text(client: aiohttp.ClientSession) -> None:
    answer = await post(client, TEXT, prompt="hello", seed=5, max_tokens=2000, logprobs=0)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["tokens"][-1] == "<|eos|>"
    assert "<|eos|>" not in answer["choices"][0]["text"]
