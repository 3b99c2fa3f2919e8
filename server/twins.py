"""Requests whose next pages another request is storing right now: they wait for these instead of computing them too.

Only before admission, and only for requests that a rank already has, which wait for nothing here: so nobody waits in
a circle. Worth it for some pages at least, and where the other's rank is not further behind than computing would
take. Every wait ends: by the store, the other's end, the loss of its rank, or a bound in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from hicache.keys import PAGE_TOKENS
from server.cache import Cache, Prospect
from server.rank import Rank
from server.work import Work

# Below it a wait for the other's store, which ends some steps after its prompt, costs more than it saves.
MIN_TOKENS: Final = 4 * PAGE_TOKENS
# By how much a wait may be longer than computing: it leaves the rank's time to others.
SLACK_TOKENS: Final = MIN_TOKENS
# Times as long as the owner's rank should take for all it has to compute: then something holds it up.
PATIENCE: Final = 2.0
MIN_WAIT_S: Final = 1.0
MAX_WAIT_S: Final = 60.0
# While nobody knows how fast a rank is.
UNMEASURED_WAIT_S: Final = 10.0
# Requests waited for one after the other: each one's end may have shown the next.
MAX_OWNERS: Final = 8
# Requests that wait at once; more go on and compute. They are in no line that bounds them.
MAX_WAITING: Final = 1024


class Twins:
    """The waits of one server; `behind(index)` gives the prompt tokens before a rank."""

    def __init__(self, cache: Cache, ranks: Sequence[Rank], behind: Callable[[int], int]) -> None:
        self._cache = cache
        self._ranks = ranks
        self._behind = behind
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self.waited = 0  # requests that waited
        self.gave_up = 0  # and those whose time was over

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    def close(self) -> None:
        """Nobody waits on: the server ends, or the cache does."""
        self._closed = True
        for ended in self._waiting:
            _set(ended)

    async def follow(self, work: Work, prospect: Prospect, choose: Callable[[], int]) -> Prospect:
        """Wait while it is worth it; returns what the prompt finds then. `choose` names the rank it would go to."""
        started = deadline = time.monotonic()
        for turn in range(MAX_OWNERS):
            owner = self._worth(prospect, choose) if work.reuse else None
            if owner is None:
                break
            if turn == 0:
                self.waited += 1
                deadline += self._patience(owner)
            in_time = await self._wait(prospect, deadline - time.monotonic())
            prospect = self._cache.look(work)
            prospect.reuse.waited_s = time.monotonic() - started
            if not in_time:
                self.gave_up += 1
                break
        return prospect

    def _worth(self, prospect: Prospect, choose: Callable[[], int]) -> int | None:
        """The rank of the request to wait for."""
        look = prospect.look
        if look is None or look.waits_for is None or look.twin_tokens < MIN_TOKENS:
            return None
        if self._closed or len(self._waiting) >= MAX_WAITING:
            return None
        owner = self._cache.owner(look.waits_for)
        if owner is None or not self._ranks[owner].ready:
            return None
        # The wait ends when the owner's rank has done all it has; computing, when ours has done what it has and these.
        longer = self._behind(owner) - self._behind(choose()) - look.twin_tokens
        return owner if longer <= SLACK_TOKENS else None

    def _patience(self, owner: int) -> float:
        rate = self._ranks[owner].prefill_rate
        seconds = PATIENCE * self._behind(owner) / rate if rate > 0 else UNMEASURED_WAIT_S
        return min(MAX_WAIT_S, max(MIN_WAIT_S, seconds))

    async def _wait(self, prospect: Prospect, seconds: float) -> bool:
        """Until the store has ended. False: the time is over."""
        assert prospect.look is not None
        assert prospect.look.waits_for is not None
        ended = asyncio.get_running_loop().create_future()
        self._waiting.add(ended)
        try:
            async with asyncio.timeout(seconds):
                self._cache.settled(prospect.look.waits_for, lambda: _set(ended))
                await ended
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(ended)
        return True


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # cancelled, or woken for another reason
        ended.set_result(None)
