"""From a prompt to a stream: checks, routing, a turn, a slot, and one message into the rank's ring (step 6).

Whatever goes wrong on the way, the promise that admission made is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ipc.messages import Facts, Sampling, Submit
from server.admission import Admission
from server.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    ShuttingDownError,
)
from server.rank import Rank
from server.route import Router
from server.stream import TokenStream


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt and what is wanted of it."""

    request_id: str
    caller: str  # the name of the API key
    session: bytes  # what names the conversation
    ids: npt.NDArray[np.int32]
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0
    ignore_eos: bool = False


class Submitter:
    """Places work on ranks."""

    def __init__(self, ranks: Sequence[Rank], router: Router, admission: Admission) -> None:
        self._ranks = ranks
        self._router = router
        self._admission = admission
        self.closed = False  # True once the server is going down

    @property
    def facts(self) -> Facts:
        """Of the model that is served. Raises ShuttingDownError and NotReadyError."""
        self._check_open()
        facts = self._ranks[self._router.least_loaded()].facts
        assert facts is not None  # a ready rank has told them
        return facts

    def room_after(self, ids: npt.NDArray[np.int32], param: str) -> int:
        """How many tokens the context leaves for the answer; `param` names the field in messages.

        Raises ContextLengthError, InvalidRequestError for an empty prompt or an id outside the vocabulary, and
        what `facts` raises.
        """
        facts = self.facts
        if len(ids) == 0:
            raise InvalidRequestError(f"{param}: the prompt has no tokens", param)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= facts.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"{param}: token id {wrong} is outside the vocabulary of {facts.vocab_size}", param
            )
        if len(ids) >= facts.max_model_len:
            raise ContextLengthError(len(ids), facts.max_model_len, param)
        return facts.max_model_len - len(ids)

    async def submit(self, work: Work) -> TokenStream:
        """Wait for a turn and start. The caller must read the stream to its end or cancel it.

        Raises NotReadyError, ShuttingDownError, OverloadedError and RateLimitedError.
        """
        self._check_open()
        tokens = len(work.ids)
        index = await self._admission.enter(self._router.choose(work.session), work.caller, tokens)
        rank = self._ranks[index]
        try:
            self._check_open()
            return self._start(rank, work)
        finally:
            rank.forget(tokens)
            rank.made_room()

    def waiting(self, index: int) -> tuple[int, int]:
        """Requests and prompt tokens in the line before a rank."""
        return self._admission.waiting(index)

    def rank_lost(self, rank: Rank) -> None:
        """Hand the line of a lost rank to the others."""
        self._admission.abandon(rank.index, lambda tokens: self._router.least_loaded())

    def close(self) -> None:
        """Take nothing more; what waits for a turn is told."""
        self.closed = True
        self._admission.fail_all(ShuttingDownError("the server is shutting down"))

    def _check_open(self) -> None:
        if self.closed:
            raise ShuttingDownError("the server is shutting down")

    def _start(self, rank: Rank, work: Work) -> TokenStream:
        if not rank.ready:
            raise NotReadyError(f"engine rank {rank.index} is {rank.state}")
        stream = TokenStream(len(work.ids))
        place = rank.slots.take(stream)
        assert place is not None  # the promise kept one free
        prompt = work.ids.astype("<i4", copy=False).tobytes()
        request = Submit(
            *place, work.request_id, prompt, work.max_tokens, work.sampling, work.min_tokens, work.ignore_eos
        )
        if not rank.submit(stream, place[0], request):
            raise OverloadedError(f"the submit ring of rank {rank.index} is full")
        return stream
