"""The account of one prompt: its times and counts, closed exactly once into metrics and one log line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from server.log import line
from server.metrics import Metrics

log = logging.getLogger("deepinfer.request")


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as its parts refer to it."""

    request_id: str
    endpoint: str
    caller: str  # the name of the API key
    started: float = field(default_factory=time.monotonic)


class Account:
    """Opened with the prompt; `submitted`, `received` per batch, and `close` once, however the request ends."""

    def __init__(self, metrics: Metrics, call: Call, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._metrics = metrics
        self._call = call
        self._submitted: float | None = None
        self._first: float | None = None

    def submitted(self) -> None:
        """The prompt has left for its rank."""
        self._submitted = time.monotonic()
        self._metrics.requests.inc()
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        self._metrics.prompt_length.observe(self.prompt_tokens)
        self._metrics.queue_time.observe(self._submitted - self._call.started)

    def received(self, tokens: int) -> None:
        """Count a batch of tokens that the client gets."""
        if self._first is None and tokens:
            self._first = time.monotonic()
            self._metrics.ttft.observe(self._first - self._call.started)
            if self._submitted is not None:
                self._metrics.prefill_time.observe(self._first - self._submitted)
        self.completion_tokens += tokens

    def close(self, outcome: str) -> None:
        """`stop` or `length` for an answer, `aborted` for a client that left, `error` for the rest."""
        elapsed = time.monotonic() - self._call.started
        if self._submitted is not None:
            self._count(outcome, elapsed)
        log.info(
            line(
                id=self._call.request_id,
                endpoint=self._call.endpoint,
                key=self._call.caller,
                outcome=outcome,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=0,
                completion_tokens=self.completion_tokens,
                queue_s=self._since_start(self._submitted),
                ttft_s=self._since_start(self._first),
                total_s=f"{elapsed:.4f}",
            )
        )

    def _count(self, outcome: str, elapsed: float) -> None:
        match outcome:
            case "aborted":
                self._metrics.aborted.inc()
            case "error":
                self._metrics.errors.inc()
            case _:
                self._metrics.finished.inc()
                if outcome == "length":
                    self._metrics.cut_off.inc()
                if self._first is not None:
                    self._metrics.decode_time.observe(self._call.started + elapsed - self._first)
                self._metrics.e2e.observe(elapsed)
                self._metrics.output_length.observe(self.completion_tokens)

    def _since_start(self, moment: float | None) -> str:
        return "-" if moment is None else f"{moment - self._call.started:.4f}"
