"""The account of one prompt: its times and counts, closed exactly once into metrics and one log line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

from server.changes import Changed
from server.log import line
from server.metrics import Metrics
from server.reuse import OFF, Reuse

log = logging.getLogger("deepinfer.request")

RUNNING: Final = "running"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as its parts refer to it."""

    request_id: str
    endpoint: str
    caller: str  # the name of the API key
    started: float = field(default_factory=time.monotonic)


class Account:
    """Opened with the prompt; `submitted`, `received` per batch, and `close` once, however the request ends."""

    def __init__(self, metrics: Metrics, call: Call, prompt_tokens: int, changed: Changed | None = None) -> None:
        self.call = call
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._metrics = metrics
        self._changed = changed
        self._reuse = Reuse()
        self._outcome = RUNNING
        self._submitted: float | None = None
        self._first: float | None = None
        self._closed: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that were not computed; known with the first token."""
        return self._reuse.cached_tokens

    def submitted(self, reuse: Reuse) -> None:
        """The prompt has left for its rank, which will tell what it reused."""
        self._submitted = time.monotonic()
        self._reuse = reuse
        self._metrics.requests.inc()
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        self._metrics.prompt_length.observe(self.prompt_tokens)
        self._metrics.queue_time.observe(self._submitted - self.call.started)

    def received(self, tokens: int) -> None:
        """Count a batch of tokens that the client gets."""
        if self._first is None and tokens:
            self._first = time.monotonic()
            self._metrics.ttft.observe(self._first - self.call.started)
            if self._submitted is not None:
                self._metrics.prefill_time.observe(self._first - self._submitted)
        self.completion_tokens += tokens

    def close(self, outcome: str) -> None:
        """`stop` or `length` for an answer, `aborted` for a client that left, `error` for the rest."""
        self._outcome = outcome
        self._closed = time.monotonic()
        if self._submitted is not None:
            self._count(outcome, self._closed - self.call.started)
        log.info(
            line(
                id=self.call.request_id,
                endpoint=self.call.endpoint,
                key=self.call.caller,
                outcome=outcome,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                completion_tokens=self.completion_tokens,
                **{name: "-" if value is None else f"{value:.4f}" for name, value in self._times().items()},
                cached_device=self._reuse.device_tokens,
                cached_host=self._reuse.host_tokens,
                why=self._reuse.why,
                changed_message="-" if self._changed is None else self._changed,
            )
        )

    def as_json(self) -> dict[str, Any]:
        """All of it, for the caller it belongs to. Times are seconds since the request came."""
        changed = self._changed
        return {
            "outcome": self._outcome,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_device": self._reuse.device_tokens,
            "cached_host": self._reuse.host_tokens,
            "why_not_more": self._reuse.told,
            "load_error": self._reuse.error or None,
            "deferred": self._reuse.deferred,
            "waited_for_twin_s": self._reuse.waited_s,
            "changed_message": None if changed is None else {"index": changed.index, "role": changed.role},
            **self._times(),
        }

    def _times(self) -> dict[str, float | None]:
        moments = {"queue_s": self._submitted, "ttft_s": self._first, "total_s": self._closed}
        return {name: None if at is None else at - self.call.started for name, at in moments.items()}

    def _count(self, outcome: str, elapsed: float) -> None:
        if self._reuse.why != OFF:
            self._metrics.not_cached(self._reuse.why, self.prompt_tokens - self.cached_tokens)
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
                    self._metrics.decode_time.observe(self.call.started + elapsed - self._first)
                self._metrics.e2e.observe(elapsed)
                self._metrics.output_length.observe(self.completion_tokens)
