"""One prompt's answer: its stream, its text (step 10), its end.

A Generation is a context manager: however its block is left, the engine is told, the slot comes back and the
account is closed. Read it as pieces, one a token, or as raw ids where nothing but the text is wanted. Knows nothing
about HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from ipc.messages import Finish, Flag, TopLogprobs
from server.account import Account
from server.stream import Ids, Records, TokenStream
from server.submit import Submitter
from server.tokenizer.detok import Detokenizer
from server.tokenizer.pieces import Pieces
from server.tokenizer.stops import StopFinder
from server.work import Work

REASONS: Final = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Piece(NamedTuple):
    """What one token adds; `text` may be empty (half a character, a special token, the start of a stop string)."""

    id: int
    text: str
    logprob: float
    top: TopLogprobs | None
    finish_reason: str | None


class Generation:
    """One prompt's work. `start` it and read it inside its `with` block."""

    def __init__(
        self, submitter: Submitter, work: Work, pieces: Pieces, account: Account, stops: Sequence[str]
    ) -> None:
        self.account = account
        self.finish_reason: str | None = None
        self._submitter = submitter
        self._work = work
        self._pieces = pieces
        self._stops = StopFinder(stops) if stops else None
        self._stream: TokenStream | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self.account.close(self._outcome(error))

    @property
    def prompt(self) -> Ids:
        """The prompt's ids."""
        return self._work.ids

    @property
    def plain(self) -> bool:
        """Whether ids alone say what to show: no stop strings have to be looked for."""
        return self._stops is None

    async def start(self) -> None:
        """Wait for a turn and submit. Raises ApiError."""
        self._stream = await self._submitter.submit(self._work)
        self.account.submitted(self._stream.reuse)

    # ---- as ids ----

    async def next_ids(self) -> tuple[Ids, str | None]:
        """A batch of ids and, with the last one, the finish reason. Raises the ApiError of a failure."""
        stream = self._started()
        records = await stream.next_batch()
        ids: Ids = np.ascontiguousarray(records["token"])
        self.count(len(ids))
        self.finish_reason = REASONS.get(stream.finish)
        return ids, self.finish_reason

    async def divert(self, send: Callable[[Ids], bool]) -> None:
        """Pass ids on as they come, all but the last; returns when `next_ids` has some or `send` said False."""

        def sink(ids: Ids) -> bool:
            self.count(len(ids))
            return send(ids)

        await self._started().divert(sink)

    def count(self, tokens: int) -> None:
        """Take tokens into the account."""
        self.account.received(tokens)

    # ---- as pieces ----

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, one a token; the last one has the finish reason. Raises the ApiError of a failure."""
        stream = self._started()
        detokenizer = Detokenizer(self._pieces)
        while self.finish_reason is None:
            records = await stream.next_batch()
            if not len(records):
                return
            # What is queued is taken whole: the last batch of an ended stream holds the last token.
            end = REASONS.get(stream.finish)
            batch = list(self._batch(stream, detokenizer, records, end))
            self.count(len(batch))
            yield batch

    def _batch(
        self, stream: TokenStream, detokenizer: Detokenizer, records: Records, end: str | None
    ) -> Iterator[Piece]:
        rows = records[["token", "logprob", "position", "flags"]].tolist()
        for row, (token, logprob, position, flags) in enumerate(rows):
            last = end is not None and row == len(rows) - 1
            # An end-of-sequence id that ends the answer is no text, whether the tokenizer calls it special or not.
            text = "" if last and flags & Flag.EOS else detokenizer.push([token])
            if last:
                text += detokenizer.flush()
            made = self.account.completion_tokens + row + 1
            text, stopped = self._before_stop(text, watch=made > self._work.min_tokens, last=last)
            if stopped:
                self.finish_reason = "stop"
            elif last:
                self.finish_reason = end
            top = stream.top.pop(position, None) if flags & Flag.TOP else None
            yield Piece(token, text, logprob, top, self.finish_reason)
            if stopped:
                stream.cancel()
                return

    def _before_stop(self, text: str, *, watch: bool, last: bool) -> tuple[str, bool]:
        if self._stops is None or not watch:
            return text, False
        shown = self._stops.push(text)
        if self._stops.found:
            return shown, True
        return (shown + self._stops.flush() if last else shown), False

    def _started(self) -> TokenStream:
        assert self._stream is not None, "start comes before reading"
        return self._stream

    def _outcome(self, error: BaseException | None) -> str:
        if self.finish_reason is not None and error is None:
            return self.finish_reason
        if error is None or isinstance(error, asyncio.CancelledError | ConnectionError | GeneratorExit):
            return "aborted"
        return "error"
