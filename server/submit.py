"""From a prompt to a stream: checks, routing, a turn, a slot, and one message into the rank's ring (step 6).

What the prefix cache has of a prompt costs no turn. Whatever goes wrong on the way, the promise that admission made
and what the cache pinned are given back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ipc.messages import CachePlan, Facts, Submit
from server.admission import Admission
from server.cache import Cache, Prospect
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
from server.turns import Turns
from server.twins import Twins
from server.work import Work

# The first of a line is looked up again at most so often: a long prompt costs the loop some tenths of a millisecond.
LOOK_INTERVAL_S: Final = 0.05


class Submitter:
    """Places work on ranks."""

    def __init__(self, ranks: Sequence[Rank], router: Router, admission: Admission, cache: Cache, turns: Turns) -> None:
        self._ranks = ranks
        self._router = router
        self._admission = admission
        self._cache = cache
        self._turns = turns
        self.twins = Twins(cache, ranks, lambda index: router.work(index)[0])
        cache.trust.on_disabled = self.twins.close
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

        def choose() -> int:
            return self._router.choose(work.session)

        found = _Found(self._cache, work, await self.twins.follow(work, self._cache.look(work), choose))
        # Looking a long prompt up and sending it take about as long as each other: not both in one go.
        await self._turns.breathe(work.ids.nbytes)
        self._check_open()
        index = await self._admission.enter(choose(), work.caller, found.prospect.tokens, found.again)
        rank, tokens = self._ranks[index], found.prospect.tokens
        try:
            self._check_open()
            return self._start(rank, work, found.prospect)
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
        self.twins.close()
        self._admission.fail_all(ShuttingDownError("the server is shutting down"))

    def _check_open(self) -> None:
        if self.closed:
            raise ShuttingDownError("the server is shutting down")

    def _start(self, rank: Rank, work: Work, prospect: Prospect) -> TokenStream:
        if not rank.ready:
            raise NotReadyError(f"engine rank {rank.index} is {rank.state}")
        plan = self._cache.plan(rank.index, prospect, work)
        sent = False
        try:
            stream = self._send(rank, work, prospect, plan)
            sent = True
        finally:
            if plan is not None and not sent:
                self._cache.withdraw(plan)
        return stream

    def _send(self, rank: Rank, work: Work, prospect: Prospect, plan: CachePlan | None) -> TokenStream:
        stream = TokenStream(prospect.tokens, prospect.reuse)
        place = rank.slots.take(stream)
        assert place is not None  # the promise kept one free
        prompt = work.ids.astype("<i4", copy=False).tobytes()
        request = Submit(
            *place, work.request_id, prompt, work.max_tokens, work.sampling, work.min_tokens, work.ignore_eos, plan
        )
        if not rank.submit(stream, place[0], request):
            raise OverloadedError(f"the submit ring of rank {rank.index} is full")
        return stream


class _Found:
    """What the cache has of a prompt, looked up again while it waits: others may have stored its pages meanwhile."""

    def __init__(self, cache: Cache, work: Work, prospect: Prospect) -> None:
        self.prospect = prospect
        self._cache = cache
        self._work = work
        self._looked = time.monotonic()

    def again(self) -> int:
        """Tokens to compute by now, or some moments ago."""
        now = time.monotonic()
        if now - self._looked >= LOOK_INTERVAL_S:
            waited_s = self.prospect.reuse.waited_s
            self.prospect = self._cache.look(self._work)
            self.prospect.reuse.waited_s = waited_s
            self._looked = now
        return self.prospect.tokens
