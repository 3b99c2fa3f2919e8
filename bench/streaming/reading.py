"""What one measured window says, and how several windows become one row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.streaming.server_process import Sample


@dataclass(frozen=True, slots=True)
class Reading:
    """One window over one server."""

    seconds: float
    tokens: float
    server_cpu: float  # seconds
    engine_cpu: float
    gaps: Sequence[float]  # seconds between chunks of the probe's stream
    lag: Mapping[float, float]  # upper bound in seconds -> observations up to it, in this window
    bytes_per_token: float

    @classmethod
    def between(cls, start: Sample, end: Sample, gaps: Sequence[float], bytes_per_token: float) -> Reading:
        """The difference of two samples."""
        return cls(
            end.time - start.time,
            end.tokens - start.tokens,
            end.server_cpu - start.server_cpu,
            end.engine_cpu - start.engine_cpu,
            gaps,
            {bound: count - start.lag[bound] for bound, count in end.lag.items()},
            bytes_per_token,
        )


def summary(readings: Sequence[Reading]) -> dict[str, float]:
    """Medians over windows; loop lag, of which a window has few observations, is pooled. NaN where nothing came."""
    pooled = {bound: sum(reading.lag[bound] for reading in readings) for bound in readings[0].lag}
    return {
        "tokens_s": statistics.median(reading.tokens / reading.seconds for reading in readings),
        "server_us": statistics.median(_per_token(reading.server_cpu, reading) for reading in readings),
        "engine_us": statistics.median(_per_token(reading.engine_cpu, reading) for reading in readings),
        "gap_p50_ms": statistics.median(1e3 * quantile(reading.gaps, 0.5) for reading in readings),
        "gap_p99_ms": statistics.median(1e3 * quantile(reading.gaps, 0.99) for reading in readings),
        "lag_p99_ms": 1e3 * bucket_quantile(pooled, 0.99),
        "bytes_token": statistics.median(reading.bytes_per_token for reading in readings),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; NaN for none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bucket_quantile(buckets: Mapping[float, float], share: float) -> float:
    """A quantile of cumulative buckets, straight within a bucket, as Prometheus reads them; NaN when all are empty.

    What lies beyond the last finite bound is given as that bound.
    """
    bounds = sorted(buckets)
    wanted = share * buckets[bounds[-1]]
    if wanted == 0:
        return math.nan
    low = below = 0.0
    for bound in bounds:
        if math.isinf(bound):
            break
        if buckets[bound] >= wanted:
            return low + (bound - low) * (wanted - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return low


def _per_token(seconds: float, reading: Reading) -> float:
    return 1e6 * seconds / reading.tokens if reading.tokens else math.nan
