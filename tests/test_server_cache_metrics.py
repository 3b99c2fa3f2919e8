"""The names and values under which the prefix cache is watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.keys import PAGE_TOKENS
from server.cache import Cache
from server.cache_metrics import POOL_GAUGES, RANK_COUNTERS, TIER_COUNTERS
from server.metrics import Metrics
from server.twins import Twins
from tests.cached_ranks import PAGES, CachedRanks, cached_ranks, prompt

ONE = {"dp_rank": "0"}


@pytest.fixture
async def ranks() -> Iterator[CachedRanks]:  # type: ignore[misc]
    with cached_ranks() as made:
        yield made


def read(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"deepinfer_hicache:{name}", labels)
    assert found is not None, name
    return found


async def test_every_counter_and_gauge_has_its_rank(ranks: CachedRanks) -> None:
    metrics = Metrics()
    metrics.watch_cache([ranks.pairs[0].rank], ranks.cache, ranks.submitter.twins)
    for pages in (3.5, 5.5):
        await ranks.submitter.submit(prompt(pages))
        assert read(metrics, "inflight", **ONE) == 1
        ranks.finish(ranks.submitted())
    values = {name: read(metrics, f"{name}_total", **ONE) for name in (*RANK_COUNTERS, *TIER_COUNTERS)}
    told = {name: value for name, value in values.items() if value}
    assert told == {
        "lookups": 2, "hits": 1, "lookup_tokens": 9 * PAGE_TOKENS, "hit_tokens": 3 * PAGE_TOKENS, "stores": 2,
        "pages_stored": 5, "pages_loaded": 3, "queries": 9 * PAGE_TOKENS, "host_hits": 3 * PAGE_TOKENS,
    }  # fmt: skip
    assert [read(metrics, name, **ONE) for name in POOL_GAUGES] == [5, PAGES, 0, 0]
    assert read(metrics, "hit_rate_tokens", **ONE) == pytest.approx(1 / 3)
    assert read(metrics, "inflight", **ONE) == 0
    assert read(metrics, "enabled") == 1
    ranks.cache.trust.fault("bad memory")
    assert read(metrics, "faults_total") == 1


def test_a_cache_that_is_off_counts_nothing() -> None:
    metrics, cache = Metrics(), Cache([])
    metrics.watch_cache([], cache, Twins(cache, [], lambda index: 0))
    assert read(metrics, "enabled") == 0
    assert b"deepinfer_hicache:pages_total" in metrics.expose()
