"""The server's Prometheus metrics, in a registry of their own.

Names kept from earlier servers over the same engine (`deepinfer:*`) stay as they are. Gauges of the ranks are
read when scraped, so an idle server does no bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.cache import Cache
from server.cache_metrics import CacheCounts
from server.rank import Rank, RankState
from server.tally import Tally
from server.tokenizer.encode import Encoder
from server.twins import Twins

_TTFT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_ENCODE_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_TOKEN_BUCKETS: Final = (1, 8, 32, 128, 512, 2048, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
_LAG_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class Metrics:
    """Counters and histograms, updated where things happen."""

    def __init__(self) -> None:
        # A second series for every counter, which no dashboard reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests accepted: one per prompt")
        self.finished = self._counter("finished", "Requests that ended with an answer")
        self.cut_off = self._counter("cut_off", "Answers that ended at max_tokens or at the context's end")
        self.aborted = self._counter("aborted", "Requests whose client went away")
        self.errors = self._counter("errors", "Requests that ended with an error")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.completion_tokens = self._counter("completion_tokens", "Tokens generated")
        self.encode_fallbacks = self._counter("encode_fallbacks", "Conversations rendered by the plain fallback")
        self.refused = Counter(
            "deepinfer:refused", "HTTP requests answered with an error", ["code"], registry=self.registry
        )
        self.late_records = self._counter("late_records", "Token records of requests that were gone")
        self.rank_failures = self._counter("rank_failures", "Ranks that died or hung")
        self.stalled = self._counter("stalled_readers", "Streams cut off since their client read nothing")
        self.ttft = self._histogram("time_to_first_token_seconds", "Body read to first token", _TTFT_BUCKETS)
        self.queue_time = self._histogram("queue_time_seconds", "Body read to prompt handed to its rank", _TTFT_BUCKETS)
        self.prefill_time = self._histogram("prefill_time_seconds", "Prompt handed over to first token", _TTFT_BUCKETS)
        self.decode_time = self._histogram("decode_time_seconds", "First token to last token", _E2E_BUCKETS)
        self.itl = Tally("deepinfer:inter_token_latency_seconds", "Engine time between tokens", _ITL_BUCKETS)
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Body read to last token", _E2E_BUCKETS)
        self.encode = self._histogram("encode_seconds", "Rendering and tokenizing a prompt", _TTFT_BUCKETS)
        self._tokenizer_time = Histogram(
            "deepinfer_tokenizer:encode_seconds", "Tokenizing a prompt", ["backend"], buckets=_ENCODE_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self._tokenizer_tokens = Counter(
            "deepinfer_tokenizer:tokens", "Tokens of encoded prompts", ["backend"], registry=self.registry
        )
        self._not_cached = Counter(
            "deepinfer_hicache:not_cached", "Prompts, by why no more of them was cached", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self._not_cached_tokens = Counter(
            "deepinfer_hicache:not_cached_tokens", "Their tokens that were computed", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt lengths", _TOKEN_BUCKETS)
        self.output_length = self._histogram("request_generation_tokens", "Answer lengths", _TOKEN_BUCKETS)
        self.loop_lag = self._histogram("loop_lag_seconds", "How late the event loop runs a timer", _LAG_BUCKETS)

    def watch(self, ranks: Sequence[Rank], waiting: Callable[[int], tuple[int, int]]) -> None:
        """Add the gauges of these ranks; `waiting(index)` gives requests and prompt tokens in a rank's line."""
        self.registry.register(_RankGauges(ranks, waiting))

    def watch_cache(self, ranks: Sequence[Rank], cache: Cache, twins: Twins) -> None:
        """Add what the prefix cache did."""
        self.registry.register(CacheCounts(ranks, cache, twins))

    def watch_encoder(self, encoder: Encoder, reason: str) -> None:
        """Add what the encoder's caches and checks did; `reason` says why its backend was chosen."""
        self.registry.register(_EncoderCounts(encoder, reason))

    def encoded(self, backend: str, seconds: float, tokens: int) -> None:
        """One prompt was encoded; called from any thread."""
        self._tokenizer_time.labels(backend).observe(seconds)
        self._tokenizer_tokens.labels(backend).inc(tokens)

    def not_cached(self, reason: str, tokens: int) -> None:
        """One prompt ended, and so many of its tokens had to be computed."""
        self._not_cached.labels(reason).inc()
        self._not_cached_tokens.labels(reason).inc(tokens)

    def expose(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"deepinfer:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"deepinfer:{name}", text, buckets=buckets, registry=self.registry)


class _RankGauges:
    """Reads the ranks at the moment of a scrape."""

    def __init__(self, ranks: Sequence[Rank], waiting: Callable[[int], tuple[int, int]]) -> None:
        self._ranks = ranks
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        def stat(name: str) -> Callable[[Rank], float]:
            return lambda rank: getattr(rank.stats, name) if rank.stats is not None else 0

        def depth(name: str) -> Callable[[Rank], float]:
            return lambda rank: getattr(rank.link.depth(), name) if rank.link is not None else 0

        yield self._gauge("rank_ready", "1 when the rank takes requests", lambda r: r.state is RankState.READY)
        yield self._gauge("slots_used", "Request slots taken", lambda r: r.slots.taken)
        yield self._gauge("num_requests_running", "Requests in the rank's batch", stat("running"))
        yield self._gauge("num_requests_waiting", "Requests queued in the rank", stat("waiting"))
        yield self._gauge("line_requests", "Requests in the line before the rank", lambda r: self._waiting(r.index)[0])
        yield self._gauge("line_tokens", "Their prompt tokens", lambda r: self._waiting(r.index)[1])
        yield self._gauge("pending_prompt_tokens", "Prompt tokens given and not computed", lambda r: r.pending_tokens)
        yield self._gauge("prefill_rate", "Prompt tokens a second, measured", lambda r: r.prefill_rate)
        yield self._gauge("kv_blocks_used", "KV blocks held by requests", stat("blocks_used"))
        yield self._gauge("kv_blocks_cached", "KV blocks not in use that hold pages to reuse", stat("blocks_cached"))
        yield self._gauge("kv_blocks", "KV blocks of the pool", stat("blocks_total"))
        yield self._gauge("engine_steps", "Engine steps since the rank started", stat("steps"))
        yield self._gauge("preemptions", "Preemptions since the rank started", stat("preemptions"))
        yield self._gauge("engine_stalls", "Passes skipped since the rings were full", stat("stalls"))
        yield self._gauge("rank_restarts", "Restarts of the rank", lambda r: r.restarts)
        yield self._gauge("ring_submit_bytes", "Bytes waiting in the submit ring", depth("submit_bytes"))
        yield self._gauge("ring_event_bytes", "Bytes waiting in the event ring", depth("event_bytes"))
        yield self._gauge("ring_token_records", "Records waiting in the token ring", depth("records"))

    def _gauge(self, name: str, text: str, read: Callable[[Rank], float]) -> Metric:
        family = GaugeMetricFamily(f"deepinfer:{name}", text, labels=["dp_rank"])
        for rank in self._ranks:
            family.add_metric([str(rank.index)], float(read(rank)))
        return family


class _EncoderCounts:
    """Reads the encoder at the moment of a scrape. A backend's counts end with it when it is given up."""

    def __init__(self, encoder: Encoder, reason: str) -> None:
        self._encoder = encoder
        self._chosen = encoder.backend
        self._reason = reason

    def collect(self) -> Iterable[Metric]:
        backend = self._encoder.backend
        reason = self._reason if backend is self._chosen else f"{self._chosen.name} differed from tokenizer.encode"
        chosen = GaugeMetricFamily("deepinfer_tokenizer:backend", "1 for the one in use", labels=["backend", "reason"])
        chosen.add_metric([backend.name, reason], 1)
        yield chosen
        caches = {"pieces": backend.counts(), "prefixes": self._encoder.prefix_counts()}
        hits = CounterMetricFamily("deepinfer_tokenizer:cache_hits", "Found", labels=["backend", "cache"])
        misses = CounterMetricFamily("deepinfer_tokenizer:cache_misses", "Not found", labels=["backend", "cache"])
        used = GaugeMetricFamily("deepinfer_tokenizer:cache_bytes", "Memory of texts", labels=["backend", "cache"])
        for cache, counts in caches.items():
            hits.add_metric([backend.name, cache], counts.hits)
            misses.add_metric([backend.name, cache], counts.misses)
            used.add_metric([backend.name, cache], counts.bytes)
        yield from (hits, misses, used)
        yield from self._checks()

    def _checks(self) -> Iterable[Metric]:
        checks = self._encoder.verifier.checks
        texts = {
            "checks": ("Prompts encoded again to compare", checks.done),
            "checks_skipped": ("Prompts not compared since too many waited", checks.skipped),
            "mismatches": ("Prompts whose ids differed", checks.mismatches),
            "switches": ("Times a backend was given up", checks.switches),
        }
        for name, (text, value) in texts.items():
            family = CounterMetricFamily(f"deepinfer_tokenizer:{name}", text, labels=["backend"])
            family.add_metric([self._chosen.name], value)
            yield family
