"""The prefix cache's counters and gauges, read when scraped: `deepinfer_hicache:*`, most of them per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.cache import Cache
from server.rank import Rank
from server.twins import Twins

PREFIX: Final = "deepinfer_hicache"
# Fields of `hicache.plan.RankCounts`.
RANK_COUNTERS: Final = {
    "lookups": "Prompts looked up",
    "hits": "Prompts of which something was found",
    "lookup_tokens": "Tokens of prompts looked up",
    "hit_tokens": "Tokens of them that were found",
    "deferred": "Prompts that waited for device blocks",
    "stores": "Prompts and answers whose pages were to be stored",
    "store_skipped": "Prompts and answers whose pages were not: no room, or another one stored them",
    "store_no_room": "Of them, those for want of room",
    "pages_stored": "Pages copied to the host",
    "pages_loaded": "Pages copied from the host",
    "states_stored": "States copied to the host",
    "states_loaded": "States copied from the host",
    "evicted_pages": "Pages given up to make room for this rank's",
    "evicted_states": "States given up to make room for this rank's",
    "errors": "Loads and stores that failed, and wrong checksums",
}
# Fields of `server.cache.TierCounts`.
TIER_COUNTERS: Final = {
    "queries": "Prompt tokens of requests that could reuse some",
    "device_hits": "Tokens of them found on the device",
    "host_hits": "Tokens of them copied from the host",
}
POOL_GAUGES: Final = {
    "pages_used": "Pages of the pool in use",
    "pages_total": "Pages of the pool",
    "states_used": "State slots in use",
    "states_total": "State slots",
}


class CacheCounts:
    """A collector over one cache. The pool's gauges are the same for every rank: there is one pool."""

    def __init__(self, ranks: Sequence[Rank], cache: Cache, twins: Twins) -> None:
        self._ranks = ranks
        self._cache = cache
        self._twins = twins

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        yield self._single("enabled", "1 while prompts are looked up", self._cache.on)
        yield self._counted("twins_waited", "Requests that waited for another one's pages", self._twins.waited)
        yield self._counted("twins_gave_up", "And went on without them", self._twins.gave_up)
        yield self._single("twins_waiting", "Requests that wait now", self._twins.waiting)
        yield self._counted("scrubbed_pages", "Pages whose checksum was compared", self._cache.scrubbed_pages)
        yield self._counted("scrubbed_states", "States whose checksum was compared", self._cache.scrubbed_states)
        yield self._counted("faults", "Faults; some of them disable the cache", self._cache.trust.faults)
        for name, text in TIER_COUNTERS.items():
            values = {rank.index: getattr(self._cache.tiers[rank.index], name) for rank in self._ranks}
            yield self._counters(name, text, values)
        yield from self._of_planner()

    def _of_planner(self) -> Iterable[Metric]:
        counts = {rank.index: found for rank in self._ranks if (found := self._cache.counts(rank.index)) is not None}
        for name, text in RANK_COUNTERS.items():
            yield self._counters(name, text, {rank: getattr(found, name) for rank, found in counts.items()})
        yield self._gauges(
            "inflight", "Plans not answered yet", {rank: found.inflight for rank, found in counts.items()}
        )
        rates = {rank: found.hit_tokens / max(found.lookup_tokens, 1) for rank, found in counts.items()}
        yield self._gauges("hit_rate_tokens", "Share of looked up tokens that were found", rates)
        usage = self._cache.usage()
        for name, text in POOL_GAUGES.items():
            value = 0 if usage is None else getattr(usage, name)
            yield self._gauges(name, text, {rank.index: value for rank in self._ranks})

    def _single(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{PREFIX}:{name}", text, value=float(value))

    def _counted(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"{PREFIX}:{name}", text, value=value)

    def _gauges(self, name: str, text: str, values: dict[int, float]) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}:{name}", text, labels=["dp_rank"])
        for rank, value in values.items():
            family.add_metric([str(rank)], value)
        return family

    def _counters(self, name: str, text: str, values: dict[int, float]) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}:{name}", text, labels=["dp_rank"])
        for rank, value in values.items():
            family.add_metric([str(rank)], value)
        return family
