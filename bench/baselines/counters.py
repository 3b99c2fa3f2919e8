"""The baseline's own counts, in the metric names of our server, so that one reader takes both.

Plain integers, added to on the event loop, written as Prometheus text when asked for.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from typing import Final

# Seconds. The same bounds and interval as our server's, so that the quantiles of both are equally coarse.
LAG_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
LAG_INTERVAL_S: Final = 0.25


class Counters:
    """Tokens handed to clients, and how late the event loop runs a timer."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._lag = [0] * (len(LAG_BOUNDS) + 1)

    async def watch_lag(self) -> None:
        """Sleep and see how late it was, for ever."""
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag[bisect_left(LAG_BOUNDS, time.monotonic() - due)] += 1

    def expose(self) -> str:
        """Prometheus text; buckets are cumulative."""
        lines = [f"deepinfer:completion_tokens_total {self.completion_tokens}"]
        below = 0
        for bound, count in zip((*LAG_BOUNDS, "+Inf"), self._lag, strict=True):
            below += count
            lines.append(f'deepinfer:loop_lag_seconds_bucket{{le="{bound}"}} {below}')
        return "\n".join(lines) + "\n"
