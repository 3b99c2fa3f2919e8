"""One prompt's answer as text: tokens from its stream, through the detokenizer, into pieces (step 10).

A Generation is a context manager: however its block is left, the engine is told, the slot comes back and the
account is closed. Knows nothing about HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, NamedTuple, Self

from ipc.messages import Finish
from server.account import Account
from server.stream import Token, TokenStream
from server.tokenizer.detok import Detokenizer

REASONS: Final = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Piece(NamedTuple):
    """What one token adds; `text` may be empty (half a character, a special token)."""

    token: Token
    text: str
    finish_reason: str | None


class Generation:
    """Submitted already; read it with `batches` inside its `with` block."""

    def __init__(self, stream: TokenStream, detokenizer: Detokenizer, account: Account) -> None:
        self.account = account
        self._stream = stream
        self._detokenizer = detokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stream.cancel()
        self.account.close(self._outcome(error))

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, one a token; the last one has the finish reason. Raises the ApiError of a failure."""
        while batch := await self._stream.next_batch():
            self.account.received(batch)
            # Only the last batch of an ended stream holds the last token: what is queued is taken whole.
            last = REASONS.get(self._stream.finish)
            pieces = [self._piece(token) for token in batch]
            if last is not None:
                token, text, _ = pieces[-1]
                pieces[-1] = Piece(token, text + self._detokenizer.flush(), last)
            yield pieces

    def _piece(self, token: Token) -> Piece:
        return Piece(token, "" if token.is_eos else self._detokenizer.push([token.id]), None)

    def _outcome(self, error: BaseException | None) -> str:
        if self._stream.finish in REASONS and error is None:
            return REASONS[self._stream.finish]
        if error is None or isinstance(error, asyncio.CancelledError | ConnectionError | GeneratorExit):
            return "aborted"
        return "error"
