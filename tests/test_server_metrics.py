"""What a scrape shows: the names dashboards know, the ranks' gauges of this moment, no second series a counter."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ipc.messages import Cancel, Stats
from server.metrics import Metrics
from server.rank import Rank, RankState
from server.stream import TokenStream
from tests.rank_pair import NO_RECORDS, rank_pair, record

KEPT = ["requests", "finished", "aborted", "errors", "prompt_tokens", "completion_tokens", "encode_fallbacks"]


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, dp_rank or "") -> value."""
    families = text_string_to_metric_families(metrics.expose().decode())
    return {
        (sample.name, sample.labels.get("dp_rank", "")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("name", KEPT)
def test_counters_that_dashboards_know_are_there_from_the_start(name: str) -> None:
    assert scrape(Metrics())[f"deepinfer:{name}_total", ""] == 0


def test_there_is_one_series_a_counter() -> None:
    assert not [name for name, _ in scrape(Metrics()) if name.endswith("_created")]


def test_gauges_are_read_when_scraped() -> None:
    metrics = Metrics()
    ranks = [Rank(0, 4, 1024), Rank(1, 4, 1024)]
    metrics.watch(ranks, lambda index: (12 * index, 13 * index))
    ranks[1].slots.take(TokenStream())
    ranks[1].state = RankState.READY
    ranks[1].restarts = 2
    ranks[1].pending_tokens, ranks[1].prefill_rate = 14, 15.5
    ranks[1].stats = Stats(3, 4, 5, 6, 7, 8, 9, 10, blocks_cached=11, stalls=12)
    found = scrape(metrics)
    shown = {
        "rank_ready": 1, "slots_used": 1, "num_requests_running": 3, "num_requests_waiting": 4, "kv_blocks_used": 5,
        "kv_blocks": 6, "engine_steps": 7, "preemptions": 8, "kv_blocks_cached": 11, "engine_stalls": 12,
        "rank_restarts": 2, "line_requests": 12, "line_tokens": 13, "pending_prompt_tokens": 14, "prefill_rate": 15.5,
    }  # fmt: skip
    for name, value in shown.items():
        assert found[f"deepinfer:{name}", "1"] == value, name
        assert found[f"deepinfer:{name}", "0"] == 0, name
    ranks[1].slots.release_all()
    assert scrape(metrics)["deepinfer:slots_used", "1"] == 0


def test_ring_depths_show_what_waits() -> None:
    with rank_pair() as pair:
        pair.metrics.watch([pair.rank], lambda index: (0, 0))
        pair.server.send(Cancel(0, 0))
        pair.engine.publish(NO_RECORDS, [Stats(0, 0, 0, 0, 0, 0, 0, 0)])
        pair.answer(record(0, 0), record(0, 0))
        found = scrape(pair.metrics)
        assert found["deepinfer:ring_token_records", "0"] == 2
        assert found["deepinfer:ring_submit_bytes", "0"] > 0
        assert found["deepinfer:ring_event_bytes", "0"] > 0
