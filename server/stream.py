"""One request's tokens on their way from a rank to its handler: the queue, its end, its cancel.

The queue is bounded by the request's own `max_tokens`. The collector feeds it and wakes the handler once per
drained batch; both run on the event loop, so there are no locks. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ipc.messages import Finish, TopLogprobs
from server.errors import ApiError, EngineRequestError


class Token(NamedTuple):
    """One generated token as its handler sees it."""

    id: int
    logprob: float
    is_eos: bool
    time_ns: int  # CLOCK_MONOTONIC of the engine
    top: TopLogprobs | None


class TokenStream:
    """Fed by the collector, read by one handler."""

    def __init__(self) -> None:
        self.finish = Finish.NONE
        self.top: dict[int, TopLogprobs] = {}  # events that came ahead of their records, by position
        self._tokens: list[Token] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_cancel: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """No token will come any more; what is queued can still be read."""
        return self.finish is not Finish.NONE

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Set what tells the rank that nobody reads this stream any more."""
        self._on_cancel = call

    # ---- the collector's side ----

    def feed(self, token: Token) -> None:
        """Queue a token; `wake` follows after the batch."""
        self._tokens.append(token)

    def expect_error(self, error: ApiError) -> None:
        """Keep the reason of an ERROR record that is about to follow."""
        self._error = error

    def end(self, finish: Finish) -> None:
        """The rank is done with this request; `wake` follows."""
        self.finish = finish
        if finish is Finish.ERROR and self._error is None:
            # Its event was unreadable: the client still must not take the end for a whole answer.
            self._error = EngineRequestError("the engine failed on this request; its reason was lost")
        self._on_cancel = None

    def fail(self, error: ApiError) -> None:
        """End with an error that no rank can send any more, and wake the handler."""
        self.expect_error(error)
        self.end(Finish.ERROR)
        self.wake()

    def wake(self) -> None:
        """Let the handler read what was queued."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the handler's side ----

    async def next_batch(self) -> list[Token]:
        """All tokens queued since the last call, at least one; empty at the end. Raises the ApiError it ended with."""
        if not self._tokens and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self._tokens:
            batch, self._tokens = self._tokens, []
            return batch
        if self._error is not None:
            raise self._error
        return []

    def cancel(self) -> None:
        """Nobody reads on: abort it in the engine. Harmless at any time, also after the end."""
        if self._on_cancel is not None:
            self._on_cancel()
            self._on_cancel = None
