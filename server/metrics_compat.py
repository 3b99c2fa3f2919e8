"""The same metrics under the names of vLLM, for dashboards and benchmark aggregators that read nothing else.

A view: it keeps no count of its own, and is put together from `metrics.py` and the ranks when it is scraped. What
is counted for the whole server carries the engine label of its only rank, or `all`. A family whose value this
server does not know is left out rather than set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.cache import Cache
from server.metrics import Metrics
from server.rank import Rank

ALL_ENGINES: Final = "all"

Labels = Mapping[str, str]


class CacheCounts(NamedTuple):
    """Prompt tokens asked for and found in each tier of one rank's prefix cache; they only grow."""

    device_queries: int = 0
    device_hits: int = 0
    host_queries: int = 0
    host_hits: int = 0


def cache_counts(cache: Cache, rank: Rank) -> CacheCounts:
    """What a rank's requests found cached; what its device had was not looked up in host memory."""
    queries, device_hits, host_hits = cache.cache_counts(rank.index)
    return CacheCounts(queries, device_hits, queries - device_hits, host_hits)


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """A collector of all families. `waiting(index)` gives requests and prompt tokens in the line before a rank."""

    model: str
    metrics: Metrics
    ranks: Sequence[Rank]
    waiting: Callable[[int], tuple[int, int]]
    cached: Callable[[Rank], CacheCounts]

    def expose(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """All families, of this moment."""
        yield from self._server_wide()
        yield self._endings()
        yield from self._gauges()
        yield from self._counters()
        yield self._sources()
        yield self._capacity()

    def _server_wide(self) -> Iterator[Metric]:
        ours = self.metrics
        sources: dict[str, Collector] = {
            "prompt_tokens": ours.prompt_tokens,
            "generation_tokens": ours.completion_tokens,
            "time_to_first_token_seconds": ours.ttft,
            "inter_token_latency_seconds": ours.itl,
            "e2e_request_latency_seconds": ours.e2e,
            "request_queue_time_seconds": ours.queue_time,
            "request_prefill_time_seconds": ours.prefill_time,
            "request_decode_time_seconds": ours.decode_time,
            "request_prompt_tokens": ours.prompt_length,
            "request_generation_tokens": ours.output_length,
        }
        for name, source in sources.items():
            for family in source.collect():
                yield _renamed(family, f"vllm:{name}", self._labels(self._whole))

    def _endings(self) -> Metric:
        ours = self.metrics
        answers, cut_off = _value(ours.finished), _value(ours.cut_off)
        values = {
            "stop": answers - cut_off,
            "length": cut_off,
            "abort": _value(ours.aborted),
            "error": _value(ours.errors),
        }
        family = CounterMetricFamily("vllm:request_success", "Requests that ended, by the reason")
        for reason, value in values.items():
            family.add_sample(
                "vllm:request_success_total", {**self._labels(self._whole), "finished_reason": reason}, value
            )
        return family

    def _gauges(self) -> Iterator[Metric]:
        yield self._by_rank(
            GaugeMetricFamily("vllm:num_requests_running", "Requests in the rank's batch"),
            lambda r: _stat(r, "running"),
        )
        yield self._by_rank(
            GaugeMetricFamily("vllm:num_requests_waiting", "Requests before it, in the line or in the rank"),
            lambda r: _stat(r, "waiting") + self.waiting(r.index)[0],
        )
        yield self._by_rank(
            GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks held by requests; 1 is all of them"),
            lambda r: _stat(r, "blocks_used") / max(1, _stat(r, "blocks_total")),
        )

    def _counters(self) -> Iterator[Metric]:
        reads: dict[str, tuple[str, Callable[[Rank], float]]] = {
            "num_preemptions": ("Preemptions", lambda r: _stat(r, "preemptions")),
            "prefix_cache_queries": ("Tokens looked up on the device", lambda r: self.cached(r).device_queries),
            "prefix_cache_hits": ("Tokens found on the device", lambda r: self.cached(r).device_hits),
            "external_prefix_cache_queries": ("Tokens looked up in host memory", lambda r: self.cached(r).host_queries),
            "external_prefix_cache_hits": ("Tokens found in host memory", lambda r: self.cached(r).host_hits),
            "prompt_tokens_cached": (
                "Prompt tokens found in either", lambda r: self.cached(r).device_hits + self.cached(r).host_hits
            ),
        }  # fmt: skip
        for name, (text, read) in reads.items():
            yield self._by_rank(CounterMetricFamily(f"vllm:{name}", text), read)

    def _sources(self) -> Metric:
        family = CounterMetricFamily("vllm:prompt_tokens_by_source", "Prompt tokens by where their keys came from")
        for rank in self.ranks:
            cached = self.cached(rank)
            values = {
                "local_compute": _stat(rank, "prefill_tokens"),
                "local_cache_hit": cached.device_hits,
                "external_kv_transfer": cached.host_hits,
            }
            for source, value in values.items():
                labels = {**self._labels(str(rank.index)), "source": source}
                family.add_sample("vllm:prompt_tokens_by_source_total", labels, value)
        return family

    def _capacity(self) -> Metric:
        family = GaugeMetricFamily("vllm:cache_config_info", "Size of each rank's pool, in its labels")
        for rank in self.ranks:
            if (facts := rank.facts) is not None:
                size = {"block_size": str(facts.block_size), "num_gpu_blocks": str(facts.num_blocks)}
                family.add_sample("vllm:cache_config_info", {**self._labels(str(rank.index)), **size}, 1)
        return family

    def _by_rank(self, family: Metric, read: Callable[[Rank], float]) -> Metric:
        # A counter's samples carry a suffix that its family does not.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for rank in self.ranks:
            family.add_sample(name, self._labels(str(rank.index)), float(read(rank)))
        return family

    @property
    def _whole(self) -> str:
        """The engine label of what is not counted by rank."""
        return str(self.ranks[0].index) if len(self.ranks) == 1 else ALL_ENGINES

    def _labels(self, engine: str) -> dict[str, str]:
        return {"model_name": self.model, "engine": engine}


def _renamed(source: Metric, name: str, labels: Labels) -> Metric:
    """The same samples in a family called `name`, with these labels too."""
    family = Metric(name, source.documentation, source.type)
    for sample in source.samples:
        suffix = sample.name.removeprefix(source.name)
        family.add_sample(name + suffix, {**sample.labels, **labels}, sample.value)
    return family


def _value(counter: Collector) -> float:
    (family,) = counter.collect()
    (sample,) = family.samples
    return sample.value


def _stat(rank: Rank, name: str) -> float:
    """A number of the rank's last statistics; 0 before the first."""
    return 0.0 if rank.stats is None else float(getattr(rank.stats, name))
