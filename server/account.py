"""The account of one request: its times and counts, closed exactly once into metrics and one log line."""

from __future__ import annotations

import logging
import time
from typing import Final

from server.log import line
from server.metrics import Metrics
from server.stream import Token

log = logging.getLogger("deepinfer.request")

_NS: Final = 1e-9


class Account:
    """Opened when a prompt is submitted; `received` per batch; `close` once, however the request ends."""

    def __init__(self, metrics: Metrics, request_id: str, endpoint: str, started: float, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._metrics = metrics
        self._request_id = request_id
        self._endpoint = endpoint
        self._started = started
        self._first: float | None = None
        self._last_ns = 0
        metrics.requests.inc()
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.prompt_length.observe(prompt_tokens)

    def received(self, batch: list[Token]) -> None:
        """Count a batch of tokens."""
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.ttft.observe(self._first - self._started)
        self.completion_tokens += len(batch)
        self._metrics.completion_tokens.inc(len(batch))
        for token in batch:
            if self._last_ns:
                self._metrics.itl.observe((token.time_ns - self._last_ns) * _NS)
            self._last_ns = token.time_ns

    def close(self, outcome: str) -> None:
        """`stop` or `length` for an answer, `aborted` for a client that left, `error` for the rest."""
        elapsed = time.monotonic() - self._started
        match outcome:
            case "aborted":
                self._metrics.aborted.inc()
            case "error":
                self._metrics.errors.inc()
            case _:
                self._metrics.finished.inc()
                self._metrics.e2e.observe(elapsed)
                self._metrics.output_length.observe(self.completion_tokens)
        ttft = "-" if self._first is None else f"{self._first - self._started:.4f}"
        log.info(
            line(
                id=self._request_id,
                endpoint=self._endpoint,
                outcome=outcome,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=0,
                completion_tokens=self.completion_tokens,
                ttft_s=ttft,
                total_s=f"{elapsed:.4f}",
            )
        )
