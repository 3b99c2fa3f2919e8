"""The prefix cache through HTTP: hits, ranks, callers, reset; with fake engines, whose answers show any wrong page, and
with native ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hicache.keys import PAGE_TOKENS
from tests.byte_tokenizer import SPECIAL, write_model
from tests.cached_replies import FIXED, ask, ask_both, cache_metric, explained, prompt, reset
from tests.http_calls import CHAT, TEXT, post, refusal, stream
from tests.served_engines import KINDS, Served
from tests.serving import RunningServer, eventually
from tests.test_end_to_end_lifecycle import ENDLESS, SLOW, client_of, ended, open_stream

KEYS = ["--api-key", "one", "--api-key", "two"]
PREFILL = {"DEEPINFER_FAKE_PREFILL_TOKENS_PER_S": "5000"}
STATES = {"DEEPINFER_FAKE_STATES": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[RunningServer]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def pair(served: Served) -> Iterator[RunningServer]:
    """Two ranks; requests go to the less loaded one, and a fake's prompt of ten pages takes a quarter of a second."""
    with served("--dp", "2", "--routing", "least-loaded", environ={**SLOW, **PREFILL}) as running:
        yield running


async def stored(server: RunningServer) -> None:
    """Until all that is to be stored is."""
    await asyncio.to_thread(server.wait_idle)


async def test_turns_reuse_the_turns_before_with_the_same_answers(server: RunningServer) -> None:
    async with client_of(server) as client:
        assert (await ask_both(client, prompt(3.5))).cached == 0
        for pages in (5.5, 9.25, 9.25, 20):
            before = cache_metric(server, "hit_tokens_total")
            reply = await ask_both(client, prompt(pages))
            assert reply.cached >= 3 * PAGE_TOKENS
            assert cache_metric(server, "hit_tokens_total") == before + reply.cached
        assert (await ask_both(client, prompt(12, seed=9))).why == "never_stored"
    await stored(server)


async def test_a_short_request_of_a_session_is_answered_beside_its_long_ones(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.address, headers={"X-Session-Id": "agent"}) as client:
        for pages in (4.5, 0.25, 6.5, 0.5, 6.75):
            reply = await ask_both(client, prompt(pages, seed=21))
        assert reply.cached == 6 * PAGE_TOKENS
    await stored(server)


async def test_every_offset_of_a_branch_inside_a_page_gives_its_own_answer(server: RunningServer) -> None:
    async with client_of(server) as client:
        common = prompt(2, seed=1)
        await ask(client, common + prompt(1, seed=2))
        for offset in (0, 1, 63, 127, 128):
            reply = await ask_both(client, common[: PAGE_TOKENS + offset] + prompt(1.5, seed=3 + offset))
            assert reply.cached == PAGE_TOKENS + (PAGE_TOKENS if offset == PAGE_TOKENS else 0)
    await stored(server)


async def test_generated_pages_are_cached_for_the_next_turn(server: RunningServer) -> None:
    async with client_of(server) as client:
        await next_turn_reuses_the_answer(client, server)


async def test_the_state_behind_an_answer_is_cached_for_the_next_turn(model: Path) -> None:
    with RunningServer(model, environ=STATES) as server:
        async with client_of(server) as client:
            await next_turn_reuses_the_answer(client, server)
            assert cache_metric(server, "states_loaded_total") == 1


async def next_turn_reuses_the_answer(client: aiohttp.ClientSession, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "y" * 200}]
    ids = (await post(client, "/tokenize", messages=messages))["tokens"]
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 3 * PAGE_TOKENS, "logprobs": True}
    chat = await post(client, CHAT, messages=messages, **fields)
    await stored(server)
    said = [token_id(entry) for entry in chat["choices"][0]["logprobs"]["content"]]
    turn = await ask_both(client, [*ids, *said, *ids])
    # The last token's own keys and values were never computed.
    whole = (len(ids) + len(said) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert turn.cached == whole > len(ids)


def token_id(entry: dict[str, Any]) -> int:
    raw = bytes(entry["bytes"])
    return raw[0] if len(raw) == 1 else SPECIAL[raw.decode()]


async def test_usage_tells_the_cached_tokens_in_every_form(server: RunningServer) -> None:
    async with client_of(server) as client:
        messages = [{"role": "user", "content": "x" * 3 * PAGE_TOKENS}]
        for path, body in ((CHAT, {"messages": messages}), (TEXT, {"prompt": prompt(3.5, seed=5)})):
            await post(client, path, **body, **FIXED)
            whole = (await post(client, path, **body, **FIXED))["usage"]
            cached = whole["prompt_tokens_details"]["cached_tokens"]
            assert cached == 3 * PAGE_TOKENS
            with_usage = {"stream_options": {"include_usage": True}}
            assert (await stream(client, path, **body, **FIXED, **with_usage))[-1]["usage"] == whole
            running = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            chunks = await stream(client, path, **body, **FIXED, **running)
            told = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks if "usage" in chunk]
            assert len(told) > 2
            assert set(told) == {cached}
            bypassed = (await post(client, path, **body, **FIXED, prefix_cache=False))["usage"]
            assert bypassed["prompt_tokens_details"]["cached_tokens"] == 0


async def test_many_prompts_are_summed_and_n_answers_count_their_prompt_once(server: RunningServer) -> None:
    async with client_of(server) as client:
        one, two = prompt(2.5, seed=6), prompt(3.5, seed=7)
        for ids in (one, two):
            await ask(client, ids)
        usage = (await post(client, TEXT, prompt=[one, two], n=2, **FIXED))["usage"]
        assert usage["prompt_tokens"] == len(one) + len(two)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 5 * PAGE_TOKENS
        fresh = (await post(client, TEXT, prompt=prompt(6.5, seed=8), n=3, **FIXED))["usage"]
        assert fresh["prompt_tokens_details"]["cached_tokens"] == 0, "one of them computed it"


async def test_a_conversation_hits_on_another_rank(pair: RunningServer) -> None:
    async with client_of(pair) as client:
        ids = prompt(6.5, seed=20)
        first = await ask(client, ids)
        await stored(pair)
        busy = await open_stream(client, **ENDLESS)  # on rank 0, so that the next one goes to rank 1
        reply = await ask_both(client, ids)
        busy.close()
        assert (reply.device, reply.host, reply.text) == (0, 6 * PAGE_TOKENS, first.text)
        assert cache_metric(pair, "host_hits_total", dp_rank="1") == 6 * PAGE_TOKENS
    await stored(pair)


async def test_pages_outlive_the_rank_that_stored_them(pair: RunningServer) -> None:
    async with client_of(pair) as client:
        ids = prompt(6.5, seed=21)
        first = await ask(client, ids)
        await stored(pair)
        victim = pair.rank_pid(0)
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: pair.rank_pid(0) != victim, "the rank is started again")
        await asyncio.to_thread(pair.wait_healthy)
        reply = await ask_both(client, ids)
        assert (reply.device, reply.host, reply.text) == (0, 6 * PAGE_TOKENS, first.text)
    await stored(pair)


async def test_a_rank_that_dies_while_it_stores_leaves_nothing_held(pair: RunningServer) -> None:
    async with client_of(pair) as client:
        running = [asyncio.create_task(client.post(TEXT, json={**ENDLESS, "prompt": prompt(9, seed=30)}))]
        await asyncio.to_thread(eventually, lambda: pair.metric("slots_used") == 1, "it is placed")
        os.kill(pair.rank_pid(0), signal.SIGKILL)
        for answer in await asyncio.gather(*running):
            assert answer.status == 500
            answer.close()
        await asyncio.to_thread(pair.wait_healthy)
        await stored(pair)
        await reset(client)
        await asyncio.to_thread(eventually, lambda: cache_metric(pair, "pages_used") == 0, "nothing is held")


async def test_twins_are_computed_once(pair: RunningServer) -> None:
    async with client_of(pair) as client:
        ids, waited = prompt(12.5, seed=40), cache_metric(pair, "twins_waited_total")
        replies = await asyncio.gather(*(ask(client, ids) for _ in range(6)))
        assert sorted(reply.cached for reply in replies) == [0] + [12 * PAGE_TOKENS] * 5
        assert len({reply.text for reply in replies}) == 1
        assert cache_metric(pair, "twins_waited_total") == waited + 5
    await stored(pair)


async def test_two_keys_never_share_and_see_only_their_own(served: Served) -> None:
    with served(*KEYS) as server:
        sessions = [
            aiohttp.ClientSession(server.address, headers={"Authorization": f"Bearer {key}"}) for key in ("one", "two")
        ]
        ids = prompt(4.5)
        async with sessions[0] as one, sessions[1] as two:
            async with one.post(TEXT, json={"prompt": ids, **FIXED}, headers={"X-Request-ID": "mine"}) as answer:
                assert answer.status == 200
            other = await ask(two, ids)
            assert (other.cached, other.why) == (0, "never_stored"), "also not that somebody else has it"
            assert (await ask(one, ids)).cached == 4 * PAGE_TOKENS, "the pair: the same key hits"
            assert (await ask(two, ids)).cached == 4 * PAGE_TOKENS
            assert (await explained(one, "mine"))["id"] == "mine"
            for path in ("/deepinfer/requests/mine", "/deepinfer/requests/nobody-s"):
                error = await refusal(two, path, 404, "GET")
                assert error["code"] == "request_not_found"


async def test_after_a_reset_nothing_hits(server: RunningServer) -> None:
    async with client_of(server) as client:
        await ask(client, prompt(3.5))
        await stored(server)
        told = await reset(client)
        assert told["dropped_pages"] > 0
        assert told["prefix_cache"] == {"state": "on", "reason": None}
        await asyncio.to_thread(eventually, lambda: cache_metric(server, "pages_used") == 0, "all are gone")
        assert (await ask_both(client, prompt(3.5))).cached == 0
        assert (await ask_both(client, prompt(3.5))).cached == 3 * PAGE_TOKENS


async def test_a_changed_message_is_named(server: RunningServer) -> None:
    async def turn(*texts: str) -> Any:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        async with client.post(CHAT, json={"messages": messages, **FIXED}) as answer:
            assert answer.status == 200
            told = await explained(client, answer.headers["X-Request-ID"])
        return told["prompts"][0]["changed_message"]

    async with aiohttp.ClientSession(server.address, headers={"X-Session-Id": "s1"}) as client:
        assert await turn("a" * 300, "b", "c") is None
        assert await turn("a" * 300, "b", "c", "d", "e") is None
        assert await turn("a" * 300, "B", "c", "d", "e") == {"index": 1, "role": "assistant"}
    assert "why=" in server.log()
    assert "changed_message=1:assistant" in server.log()


async def test_a_model_with_states_hits_at_their_boundaries(model: Path) -> None:
    with RunningServer(model, "--num-kv-blocks", "23", environ=STATES) as server:
        async with client_of(server) as client:
            for pages in (10.5, 12.5, 12.5, 14):
                reply = await ask_both(client, prompt(pages))
                await ask(client, prompt(22, seed=99))  # takes the device's blocks
                await stored(server)
            assert reply.host > 0
            assert cache_metric(server, "states_stored_total") > 0
            assert cache_metric(server, "states_loaded_total") > 0
            scrubbed = "scrubbed_states_total"
            await asyncio.to_thread(eventually, lambda: cache_metric(server, scrubbed) > 0, "states are checked too")
            assert cache_metric(server, "faults_total") == 0


async def test_off_is_off(served: Served) -> None:
    with served("--hicache-size-gb", "0") as server:
        assert server.get("/health")[1]["prefix_cache"] == {"state": "off", "reason": None}
        async with client_of(server) as client:
            for _ in range(2):
                reply = await ask_both(client, prompt(4.5))
                assert (reply.cached, reply.why) == (0, "off")
            assert (await reset(client))["dropped_pages"] == 0


def test_more_memory_than_there_is_is_refused_with_the_arithmetic(model: Path) -> None:
    status, log = ended(model, "--hicache-size-gb", "60000", "--dp", "2")
    assert status == 2
    assert "error: --hicache-size-gb 60000: 2 rank(s) x 60000 GiB = " in log
    status, log = ended(model, "--hicache-size-gb", "0.0000005")
    assert status == 1
    assert "--hicache-size-gb: less than one page of " in log
