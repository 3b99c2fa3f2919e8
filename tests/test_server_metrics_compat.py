"""vLLM's names at /metrics: there when asked for, of the right types, equal to our own numbers, behind our keys."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.keys import PAGE_TOKENS
from ipc.messages import Finish, Stats
from server.keys import Keys
from server.metrics import Metrics
from server.metrics_compat import CacheCounts, VllmMetrics, cache_counts
from server.rank import Rank
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import EOS, write_model
from tests.cached_ranks import cached_ranks, prompt
from tests.http_calls import TEXT, refusal
from tests.local_server import NAME, LocalServer, local_server
from tests.rank_pair import FACTS

COUNTERS = [
    "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total", "num_preemptions_total", "request_success_total",
]  # fmt: skip
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"]
HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "request_prefill_time_seconds": "prefill_time_seconds",
    "request_decode_time_seconds": "decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
ONE_RANK = {"model_name": NAME, "engine": "0"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("compat") / "tiny"))


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"vllm:{name}", frozenset({**ONE_RANK, **labels}.items())]


async def ask(server: LocalServer, client: aiohttp.ClientSession, ids: list[int], finish: Finish) -> None:
    """A prompt of three tokens, which the engine answers with these ids."""

    async def answered() -> None:
        async with client.post(TEXT, json={"prompt": [1, 2, 3], "max_tokens": 8}) as answer:
            await answer.read()

    task = asyncio.create_task(answered())
    (await server.started()).say(ids, finish)
    await task


async def scrape(client: aiohttp.ClientSession) -> Samples:
    async with client.get("/metrics") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        return samples_of(await answer.text())


async def test_nothing_is_there_by_default(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer) as server, server.client() as client:
        await refusal(client, "/metrics", 404, "GET")


async def test_a_key_is_needed_as_everywhere(tokenizer: TextTokenizer) -> None:
    keys = Keys(["secret"])
    async with local_server(tokenizer, keys=keys, metrics_compat="vllm") as server, server.client() as client:
        assert (await refusal(client, "/metrics", 401, "GET"))["code"] == "invalid_api_key"
        async with client.get("/metrics", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200


def test_types_are_told_by_the_names_that_samples_have() -> None:
    text = VllmMetrics(NAME, Metrics(), [Rank(0, 4, 1024)], lambda _: (0, 0), lambda _: CacheCounts()).expose().decode()
    told = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ")}
    wanted = {f"vllm:{name}": "counter" for name in COUNTERS} | {f"vllm:{name}": "gauge" for name in GAUGES}
    assert told == wanted | {f"vllm:{name}": "histogram" for name in HISTOGRAMS}
    for line in text.splitlines():
        assert line.startswith("# ") or (f'model_name="{NAME}"' in line and 'engine="' in line), line


async def test_numbers_are_those_of_our_own_metrics(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, metrics_compat="vllm") as server, server.client() as client:
        await ask(server, client, [97, 98, EOS], Finish.STOP)
        await ask(server, client, [97, 98], Finish.LENGTH)
        await ask(server, client, [97], Finish.LENGTH)
        await ask(server, client, [97], Finish.ERROR)
        found = await scrape(client)
        ours = samples_of(server.services.metrics.expose().decode())
    assert value(found, "prompt_tokens_total") == 12
    assert value(found, "generation_tokens_total") == ours["deepinfer:completion_tokens_total", frozenset()]
    reasons = {"stop": 1, "length": 2, "abort": 0, "error": 1}
    for reason, count in reasons.items():
        assert value(found, "request_success_total", finished_reason=reason) == count, reason
    for name, own in HISTOGRAMS.items():
        for part in ("_count", "_sum"):
            assert value(found, name + part) == ours[f"deepinfer:{own}{part}", frozenset()], name
        assert value(found, name + "_count") >= 2, name
        assert value(found, name + "_bucket", le="+Inf") == value(found, name + "_count")


def test_ranks_are_engines() -> None:
    ranks = [Rank(0, 4, 1024), Rank(1, 4, 1024)]
    ranks[1].facts = FACTS
    ranks[1].stats = Stats(3, 4, 5, 20, 7, 8, 900, 10)
    counts = CacheCounts(device_queries=1000, device_hits=60, host_queries=940, host_hits=40)
    view = VllmMetrics(
        NAME, Metrics(), ranks, lambda index: (2 * index, 0), lambda rank: counts if rank.index else CacheCounts()
    )
    found = samples_of(view.expose().decode())
    shown = {
        "num_requests_running": 3, "num_requests_waiting": 6, "kv_cache_usage_perc": 0.25, "num_preemptions_total": 8,
        "prefix_cache_queries_total": 1000, "prefix_cache_hits_total": 60,
        "external_prefix_cache_queries_total": 940, "external_prefix_cache_hits_total": 40,
        "prompt_tokens_cached_total": 100,
    }  # fmt: skip
    for name, number in shown.items():
        assert value(found, name, engine="1") == number, name
        assert value(found, name, engine="0") == 0, name
    sources = {"local_compute": 900, "local_cache_hit": 60, "external_kv_transfer": 40}
    for source, number in sources.items():
        assert value(found, "prompt_tokens_by_source_total", engine="1", source=source) == number
    assert value(found, "cache_config_info", engine="1", block_size="128", num_gpu_blocks="16") == 1
    assert value(found, "prompt_tokens_total", engine="all") == 0


async def test_what_the_device_had_was_not_looked_up_in_host_memory() -> None:
    with cached_ranks() as ranks:
        rank = ranks.pairs[0].rank
        assert cache_counts(ranks.cache, rank) == CacheCounts(0, 0, 0, 0)
        await ranks.submitter.submit(prompt(2.5))
        ranks.finish(ranks.submitted(), device_tokens=PAGE_TOKENS)
        await ranks.submitter.submit(prompt(2.5))
        ranks.finish(ranks.submitted())
        pages = (5, 1, 4, 2)
        assert cache_counts(ranks.cache, rank) == tuple(count * PAGE_TOKENS for count in pages)
