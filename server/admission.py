"""Admission: which requests go to their rank now, which wait, which are turned away (step 6 of a request's path).

A rank is given no more than it can start soon; the rest waits here, in one bounded line a rank that is fair between
API keys. A line that is full turns requests away with the time after which it should have moved. A rank that is
lost hands its line to the others. Runs on the event loop; knows nothing about HTTP, text or rings.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from server.errors import NotReadyError, OverloadedError, RateLimitedError
from server.fair import FairLine

# Share of a line that one of several keys may fill: the others' next request still finds room.
KEY_SHARE: Final = 0.5
# Bounds of Retry-After: a rank that has not been measured yet must not send clients away for hours.
MIN_RETRY_S: Final = 1
MAX_RETRY_S: Final = 120


class Place(Protocol):
    """What admission needs of a rank."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests at all."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens it was given, or promised, and has not finished computing."""
        ...

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, measured; 0 while unknown."""
        ...

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of that length would start soon."""
        ...

    def promise(self, tokens: int) -> None:
        """Keep room for a prompt that is about to be submitted."""
        ...

    def forget(self, tokens: int) -> None:
        """The promised prompt was submitted, or will not come."""
        ...


P = TypeVar("P", bound=Place)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one rank's line."""

    requests: int
    tokens: int
    shared: bool  # several keys exist, so one must not fill the line


@dataclass(eq=False, slots=True)
class _Waiter:
    key: str
    tokens: int
    recount: Callable[[], int]  # the tokens as they are by now
    turn: asyncio.Future[int]  # the index of the place whose promise it holds

    @property
    def gone(self) -> bool:
        """Cancelled, but its task has not run since and so has not left the line."""
        return self.turn.done()

    def fits(self, place: Place) -> bool:
        """Whether the place has room for it, also since less of it is left to compute than when it came."""
        if place.has_room(self.tokens):
            return True
        self.tokens = self.recount()
        return place.has_room(self.tokens)


class Admission:
    """One line in front of each place."""

    def __init__(self, places: Sequence[Place], limits: Limits) -> None:
        self._places = places
        self._limits = limits
        self._lines: list[FairLine[_Waiter]] = [FairLine() for _ in places]

    def waiting(self, index: int) -> tuple[int, int]:
        """Requests and prompt tokens in a place's line."""
        return len(self._lines[index]), self._lines[index].cost

    async def enter(self, index: int, key: str, tokens: int, recount: Callable[[], int] | None = None) -> int:
        """Wait for a turn at place `index`; returns the place that holds the promise, which may be another one.

        The promise is for `tokens`, or for what `recount` said last. The caller submits or calls `Place.forget` with
        these. Raises OverloadedError, RateLimitedError and NotReadyError.
        """
        line, place = self._lines[index], self._places[index]
        if not line and place.has_room(tokens):
            place.promise(tokens)
            return index
        self._check(index, key, tokens)
        waiter = _Waiter(key, tokens, recount or (lambda: tokens), asyncio.get_running_loop().create_future())
        line.push(key, tokens, waiter)
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def advance(self, index: int) -> None:
        """A place may have room: give turns."""
        line, place = self._lines[index], self._places[index]
        while place.ready and (following := line.next()) is not None:
            waiter = following[1]
            if not waiter.gone and not waiter.fits(place):
                return
            line.pop()
            if not waiter.gone:
                place.promise(waiter.tokens)
                waiter.turn.set_result(index)

    def abandon(self, index: int, choose: Callable[[int], int]) -> None:
        """A place is lost: its line goes where `choose(tokens)` says; everybody fails if that raises NotReadyError."""
        line, self._lines[index] = self._lines[index], FairLine()
        while line:
            waiter = line.pop()
            if waiter.gone:
                continue
            try:
                other = choose(waiter.tokens)
            except NotReadyError as error:
                waiter.turn.set_exception(error)
                continue
            # Above the other line's bound if need be: these have been let in already.
            self._lines[other].push(waiter.key, waiter.tokens, waiter)
            self.advance(other)

    def fail_all(self, error: Exception) -> None:
        """Nobody gets a turn any more."""
        for line in self._lines:
            while line:
                waiter = line.pop()
                if not waiter.gone:
                    waiter.turn.set_exception(error)

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.turn.done() and not waiter.turn.cancelled():
            # The turn came in the same moment: pass it on.
            if waiter.turn.exception() is None:
                self._places[waiter.turn.result()].forget(waiter.tokens)
                self.advance(waiter.turn.result())
            return
        for index, line in enumerate(self._lines):
            if line.remove(waiter.key, waiter):
                self.advance(index)  # a shorter prompt behind it may fit

    def _check(self, index: int, key: str, tokens: int) -> None:
        line, limits = self._lines[index], self._limits
        if limits.shared and line.cost_of(key) + tokens > limits.tokens * KEY_SHARE and line.cost_of(key):
            raise RateLimitedError(
                f"this API key has {line.cost_of(key)} prompt tokens waiting",
                retry_after_s=self._retry_after(index),
            )
        if len(line) >= limits.requests:
            raise OverloadedError(f"{len(line)} requests are waiting already", retry_after_s=self._retry_after(index))
        if line and line.cost + tokens > limits.tokens:
            raise OverloadedError(
                f"{line.cost} prompt tokens are waiting already", retry_after_s=self._retry_after(index)
            )

    def _retry_after(self, index: int) -> int:
        """Seconds until what waits should have been prefilled."""
        place = self._places[index]
        if place.prefill_rate <= 0:
            return MIN_RETRY_S
        seconds = (self._lines[index].cost + place.pending_tokens) / place.prefill_rate
        return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(seconds)))
