"""The prefix cache when things go wrong: copies that fail, bytes that flip, pools too small, clients that leave.

The answer is always the one without a cache, and in the end nothing is held. With fake engines, and in the long form
with native ones too.
"""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from hicache.faults import VARIABLE
from tests.cached_replies import FIXED, ask, ask_both, cache_metric, prompt, reset
from tests.http_calls import TEXT
from tests.served_engines import KINDS, NATIVE_LATER, Served
from tests.serving import RunningServer, eventually
from tests.test_end_to_end_lifecycle import client_of

# Blocks of a device on which a prompt of FILLER pages leaves nothing of the one before.
BLOCKS, FILLER = 23, 22
SMALL_DEVICE = ["--num-kv-blocks", str(BLOCKS)]


@pytest.fixture(scope="module", params=NATIVE_LATER)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


async def turns(server: RunningServer, rounds: int) -> list[int]:
    """Ask one conversation again and again with others between; returns what the host had of each turn."""
    found = []
    async with client_of(server) as client:
        for number in range(rounds):
            found.append((await ask_both(client, prompt(6.5 + number))).host)
            await ask(client, prompt(FILLER, seed=99))
            await asyncio.to_thread(server.wait_idle)
    return found


async def check_nothing_is_held(server: RunningServer) -> None:
    """After a reset no page is left: none was pinned or reserved for good."""
    await asyncio.to_thread(server.wait_idle)
    async with client_of(server) as client:
        await reset(client)
    await asyncio.to_thread(eventually, lambda: cache_metric(server, "pages_used") == 0, "no page is left")


@pytest.mark.parametrize(
    "fault",
    [
        "load_error_every=1",
        pytest.param("store_error_every=1", marks=pytest.mark.soak),
        pytest.param("short_copy_every=2", marks=pytest.mark.soak),
    ],
)
async def test_copies_that_fail_disable_the_cache_after_three(served: Served, fault: str) -> None:
    with served(*SMALL_DEVICE, environ={VARIABLE: fault}) as server:
        await turns(server, 6)
        status, health = server.get("/health")
        assert (status, health["prefix_cache"]["state"]) == (200, "disabled")
        assert "3 faults, the last: rank 0 could not " in health["prefix_cache"]["reason"]
        assert server.log().count("CRITICAL server.trust: the prefix cache is disabled") == 1
        async with client_of(server) as client:
            reply = await ask_both(client, prompt(6.5))
            assert (reply.cached, reply.why) == (0, "disabled")
        assert cache_metric(server, "enabled") == 0
        assert "Traceback" not in server.log()
        await check_nothing_is_held(server)


@pytest.mark.soak
async def test_a_rare_failure_costs_one_request_its_cached_tokens(served: Served) -> None:
    with served(*SMALL_DEVICE, environ={VARIABLE: "load_error_every=4"}) as server:
        assert max(await turns(server, 4)) > 0
        assert server.get("/health")[1]["prefix_cache"]["state"] == "on"
        assert cache_metric(server, "errors_total", dp_rank="0") >= 1
        await check_nothing_is_held(server)


async def test_with_verified_loads_flipped_bytes_reach_no_answer(served: Served) -> None:
    flags = [*SMALL_DEVICE, "--hicache-verify-loads"]
    with served(*flags, environ={VARIABLE: "flip_byte_every=5"}) as server:
        await turns(server, 5)
        # Found by a load or, if that was faster, in the background.
        assert cache_metric(server, "faults_total") >= 1
        await check_nothing_is_held(server)


async def test_flipped_bytes_are_found_in_the_background(served: Served) -> None:
    with served(environ={VARIABLE: "flip_byte_every=9"}) as server:
        async with client_of(server) as client:
            await ask(client, prompt(10))
            await asyncio.to_thread(eventually, lambda: cache_metric(server, "faults_total") == 1, "it is found")
            assert "is not what was stored" in server.log()
            await asyncio.to_thread(
                eventually, lambda: cache_metric(server, "scrubbed_pages_total") > 20, "it goes on without it"
            )
            assert cache_metric(server, "faults_total") == 1
        await check_nothing_is_held(server)


async def test_a_pool_smaller_than_one_prompt_serves_what_fits(served: Served) -> None:
    with served(*SMALL_DEVICE, *served.pool(5.5)) as server:
        assert await turns(server, 3) == [0, 0, 0], "a prompt that does not fit is not stored at all"
        assert cache_metric(server, "store_no_room_total", dp_rank="0") >= 3
        async with client_of(server) as client:
            for _ in range(2):
                await ask(client, prompt(FILLER, seed=99))
                reply = await ask_both(client, prompt(4.5, seed=5))
            assert reply.host == 4 * 128
        await check_nothing_is_held(server)


async def test_twelve_clients_on_a_pool_of_one_prompt_and_a_tenth(served: Served) -> None:
    flags = ["--num-kv-blocks", "64", *served.pool(22.5), "--max-num-batched-tokens", "512"]
    with served(*flags) as server:
        async with client_of(server) as client:

            async def converse(number: int) -> None:
                for pages in (6.5, 13.5, 20.5):
                    await ask_both(client, prompt(pages, seed=number % 4))

            await asyncio.gather(*(converse(number) for number in range(12)))
        assert cache_metric(server, "evicted_pages_total", dp_rank="0") > 0
        assert server.get("/health")[1]["prefix_cache"]["state"] == "on"
        await check_nothing_is_held(server)


async def test_clients_that_leave_in_any_phase_leave_no_page_held(served: Served) -> None:
    slow = {"DEEPINFER_FAKE_STEP_MS": "1", "DEEPINFER_FAKE_PREFILL_TOKENS_PER_S": "20000"}
    flags = ["--num-kv-blocks", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    with served(*flags, environ=slow) as server:
        async with aiohttp.ClientSession(server.address) as client:

            async def leave(number: int) -> None:
                """Some before a rank has them, some as twins, some while they load, compute, store or answer."""
                body = {"prompt": prompt(4 + number % 9, seed=number % 3), **FIXED, "max_tokens": 40}
                request = asyncio.create_task(client.post(TEXT, json=body))
                await asyncio.wait([request], timeout=0.02 * (number % 16))
                request.cancel()
                await asyncio.wait([request])
                if not request.cancelled():
                    request.result().close()

            await asyncio.gather(*(leave(number) for number in range(64)))
            await asyncio.to_thread(server.wait_idle)
            for seed in range(3):
                await ask_both(client, prompt(8.5, seed=seed))
        assert cache_metric(server, "twins_waiting") == 0
        assert cache_metric(server, "faults_total") == 0
        await check_nothing_is_held(server)
