"""One request's tokens on their way from a rank to its handler: the queue, its end, its cancel.

The handler pulls batches, or diverts them into a sink that is called as they come, without a task switch. The first
and the last batch are always pulled. What waits is bounded by the request's own `max_tokens`. The collector feeds it
on the event loop's thread, so there are no locks. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ipc.layout import TOKEN_DTYPE
from ipc.messages import Finish, TopLogprobs
from server.errors import ApiError, EngineRequestError
from server.reuse import Reuse

Records = npt.NDArray[np.void]  # [n] TOKEN_DTYPE, of one request, in order
Ids = npt.NDArray[np.int32]  # [n] the tokens of those records, contiguous
Sink = Callable[[Ids], bool]  # False: give the next batches to the handler again

NO_RECORDS: Records = np.empty(0, TOKEN_DTYPE)

# A batch is a view that keeps a whole step's records alive, so of a stalled reader's stream no more than this many wait
# as they came: more become one array of 32 bytes a token.
MAX_BATCHES: Final = 64
# A record without its columns: numpy joins these as bytes, and the columns one by one.
_WHOLE: Final = np.dtype((np.void, TOKEN_DTYPE.itemsize))


class TokenStream:
    """Fed by the collector, read by one handler."""

    def __init__(self, prompt_tokens: int = 0, reuse: Reuse | None = None) -> None:
        """`prompt_tokens` are those that the rank has to compute."""
        self.finish = Finish.NONE
        self.top: dict[int, TopLogprobs] = {}  # events that came ahead of their records, by position
        self.prompt_tokens = prompt_tokens
        self.reuse = reuse or Reuse()
        self.last_ns = 0  # engine time of the last token; 0 before the first
        self._queue: list[Records] = []
        self._sink: Sink | None = None
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

    def feed(self, records: Records, ids: Ids, finish: Finish = Finish.NONE) -> None:
        """Deliver tokens and, with the last ones, the end; `ids` are the records' tokens."""
        if self._sink is not None and not finish:
            if not self._sink(ids):
                self._wake()
            return
        if len(records):
            self._queue.append(records)
            if len(self._queue) > MAX_BATCHES:
                self._queue = [_joined(self._queue)]
        if finish:
            self._end(finish)
        self._wake()

    def expect_error(self, error: ApiError) -> None:
        """Keep the reason of an ERROR record that is about to follow."""
        self._error = error

    def fail(self, error: ApiError) -> None:
        """End with an error that no rank can send any more."""
        self.expect_error(error)
        self._end(Finish.ERROR)
        self._wake()

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self._on_cancel = None
        if finish is Finish.ERROR and self._error is None:
            # The event with the reason was lost or unreadable: an answer that stops must not look like a whole one.
            self.expect_error(EngineRequestError("the engine failed on this request and gave no reason"))

    def _wake(self) -> None:
        self._sink = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the handler's side ----

    async def next_batch(self) -> Records:
        """All tokens queued since the last call, at least one; empty at the end. Raises the ApiError it ended with."""
        if not self._queue and not self.ended:
            await self._wait()
        if self._queue:
            batch = _joined(self._queue)
            self._queue.clear()
            return batch
        if self._error is not None:
            raise self._error
        return NO_RECORDS

    async def divert(self, sink: Sink) -> None:
        """Give every batch but the last to `sink` as it comes; returns when there is something to pull again.

        Nothing may be queued: call it right after `next_batch`.
        """
        if not self._queue and not self.ended:
            self._sink = sink
            try:
                await self._wait()
            finally:
                self._sink = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def cancel(self) -> None:
        """Nobody reads on: abort it in the engine. Harmless at any time, also after the end."""
        if self._on_cancel is not None:
            self._on_cancel()
            self._on_cancel = None


def _joined(batches: list[Records]) -> Records:
    if len(batches) == 1:
        return batches[0]
    return np.concatenate([batch.view(_WHOLE) for batch in batches]).view(TOKEN_DTYPE)
