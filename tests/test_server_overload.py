"""More than the ranks can start: who waits, who is turned away and for how long, and whose turn it is."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import Any, Final

import aiohttp
import pytest

from ipc.messages import Finish, Stats
from server.admission import MAX_RETRY_S
from server.keys import Keys
from server.rank import REQUESTS_AHEAD
from server.route import MAX_EXTRA_REQUESTS
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.http_calls import CHAT, TEXT
from tests.local_server import LocalServer, Started, ids_of, local_server
from tests.rank_pair import NO_RECORDS, RankPair, until

ONE: Final = 1 + REQUESTS_AHEAD  # requests that a rank of one sequence is given


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("overload") / "tiny"))


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def ask(client: aiohttp.ClientSession, prompt: list[int], headers: dict[str, str] | None = None) -> int:
    """The status of a request for one token."""
    async with client.post(TEXT, json={"prompt": prompt, "max_tokens": 1}, headers=headers) as response:
        await response.read()
        return response.status


async def refused(client: aiohttp.ClientSession, prompt: list[int], **given: Any) -> tuple[int, str, int]:
    """Status, code and Retry-After of a request that is turned away."""
    async with client.post(TEXT, json={"prompt": prompt}, **given) as response:
        error = (await response.json())["error"]
        return response.status, error["code"], int(response.headers["Retry-After"])


async def fill(server: LocalServer, client: aiohttp.ClientSession, count: int) -> list[asyncio.Task[int]]:
    """That many requests, all of them with the engine."""
    tasks = [asyncio.create_task(ask(client, [1], key("flood"))) for _ in range(count)]
    await until(lambda: sum(pair.rank.slots.taken for pair in server.pairs) == count)
    return tasks


def has_prefilled(pair: RankPair, tokens: int) -> bool:
    return pair.rank.stats is not None and pair.rank.stats.prefill_tokens == tokens


def waits(server: LocalServer, requests: int) -> bool:
    return server.services.submitter.waiting(0)[0] == requests


async def finish_all(server: LocalServer, tasks: list[asyncio.Task[int]]) -> list[Started]:
    """Answer whatever reaches the engines until all are done; returns it in that order."""
    order = []
    while not all(task.done() for task in tasks):
        try:
            async with asyncio.timeout(0.05):
                started = await server.started()
        except TimeoutError:
            continue
        started.say([97], Finish.LENGTH)
        order.append(started)
    assert {task.result() for task in tasks} == {200}
    return order


async def test_what_waits_is_served_in_order_and_what_is_above_is_turned_away(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, seqs=1, max_waiting=2) as server, server.client() as client:
        tasks = await fill(server, client, ONE)
        for number in (2, 3):
            tasks.append(asyncio.create_task(ask(client, [number])))
            await until(lambda: server.services.submitter.waiting(0)[0] == len(tasks) - ONE)
        assert await refused(client, [4]) == (503, "overloaded", 1)
        order = await finish_all(server, tasks)
        assert [ids_of(one) for one in order[ONE:]] == [[2], [3]]
        await server.idle()
        assert server.metric("refused_total", code="overloaded") == 1


async def test_retry_after_is_what_the_measured_rate_says(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, seqs=1, max_waiting=1) as server, server.client() as client:
        tasks = await fill(server, client, ONE)
        waiting = asyncio.create_task(ask(client, [1] * 100))
        await until(lambda: server.services.submitter.waiting(0) == (1, 100))
        (pair,) = server.pairs
        for prefilled in (0, 1000):
            pair.engine.publish(NO_RECORDS, [Stats(1, 0, 0, 0, 0, 0, prefilled, 0)])
            await until(functools.partial(has_prefilled, pair, prefilled))
        for rate, seconds in ((20.0, 6), (0.001, MAX_RETRY_S), (1e9, 1)):
            assert pair.rank.prefill_rate > 0
            pair.rank.prefill_rate = rate
            assert await refused(client, [4]) == (503, "overloaded", seconds)
        await finish_all(server, [*tasks, waiting])


async def test_one_key_s_flood_delays_another_key_by_one_request(tokenizer: TextTokenizer) -> None:
    keys = Keys(["flood", "calm"])
    async with local_server(tokenizer, seqs=1, keys=keys) as server, server.client() as client:
        tasks = await fill(server, client, ONE)
        tasks += [asyncio.create_task(ask(client, [1] * 50, key("flood"))) for _ in range(40)]
        await until(lambda: server.services.submitter.waiting(0)[0] == 40)
        for number in range(4):
            tasks.append(asyncio.create_task(ask(client, [2] * 50, key("calm"))))
            await until(functools.partial(waits, server, 41 + number))
        order = [ids_of(one)[0] for one in (await finish_all(server, tasks))[ONE:]]
        calm = [place for place, id_ in enumerate(order) if id_ == 2]
        assert all(place <= 2 * number + 1 for number, place in enumerate(calm)), order


async def test_a_key_above_its_share_is_a_429_and_others_are_let_in(tokenizer: TextTokenizer) -> None:
    keys = Keys(["flood", "calm"])
    async with local_server(tokenizer, seqs=1, keys=keys, max_waiting_tokens=100) as server, server.client() as client:
        tasks = await fill(server, client, ONE)
        tasks.append(asyncio.create_task(ask(client, [1] * 50, key("flood"))))
        await until(lambda: server.services.submitter.waiting(0) == (1, 50))
        assert await refused(client, [1], headers=key("flood")) == (429, "rate_limit_exceeded", 1)
        tasks.append(asyncio.create_task(ask(client, [2] * 50, key("calm"))))
        await until(lambda: server.services.submitter.waiting(0) == (2, 100))
        assert (await refused(client, [2], headers=key("calm")))[0] == 429
        await finish_all(server, tasks)
        await server.idle()


@pytest.mark.parametrize("named", [False, True])
async def test_64_conversations_that_open_alike_spread_over_the_ranks(tokenizer: TextTokenizer, named: bool) -> None:
    async def turn(client: aiohttp.ClientSession, number: int) -> int:
        headers = {"X-Request-ID": str(number), **({"X-Session-Id": str(number)} if named else {})}
        body = {"messages": [{"role": "user", "content": "the same opening"}], "max_tokens": 1}
        async with client.post(CHAT, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async with local_server(tokenizer, ranks=2, seqs=64) as server, server.client() as client:
        homes = []
        for _ in range(2):
            tasks = [asyncio.create_task(turn(client, number)) for number in range(64)]
            started = [await server.started() for _ in tasks]
            homes.append({one.submit.request_id: one.pair.rank.index for one in started})
            counts = Counter(homes[-1].values())
            assert abs(counts[0] - counts[1]) <= MAX_EXTRA_REQUESTS + 1, counts
            for one in started:
                one.say([97], Finish.LENGTH)
            assert {await task for task in tasks} == {200}
            await server.idle()
        if named:
            assert homes[0] == homes[1], "each turn goes back to the rank that knows the conversation"


async def test_clients_that_leave_the_line_make_room_in_it(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, seqs=1, max_waiting=3) as server, server.client() as client:
        tasks = await fill(server, client, ONE)
        leaving = [asyncio.create_task(ask(client, [2])) for _ in range(3)]
        await until(lambda: server.services.submitter.waiting(0)[0] == 3)
        for task in leaving:
            task.cancel()
        await until(lambda: server.services.submitter.waiting(0) == (0, 0))
        tasks.append(asyncio.create_task(ask(client, [3])))
        await until(lambda: server.services.submitter.waiting(0)[0] == 1)
        order = await finish_all(server, tasks)
        assert ids_of(order[-1]) == [3]
        await server.idle()
        assert server.metric("aborted_total") == 0, "they were never accepted"
