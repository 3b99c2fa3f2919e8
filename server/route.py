"""Which rank takes a request: step 5 of a request's path.

A conversation goes back to the rank that knows it, unless that rank is behind the least loaded one by more than a
bound; then it moves. Knows what ranks hold and what waits for them, not what requests are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from server.affinity import Homes
from server.errors import NotReadyError
from server.rank import Rank

# How far behind a conversation's own rank may be: about a step of prompt tokens, and a few requests. Its device has
# the conversation's pages; another rank has to copy them from the host, or to compute what is not cached there.
MAX_EXTRA_TOKENS: Final = 32768
MAX_EXTRA_REQUESTS: Final = 4


class Router:
    """Chooses ranks; `waiting(index)` gives requests and prompt tokens in a rank's line."""

    def __init__(self, ranks: Sequence[Rank], waiting: Callable[[int], tuple[int, int]], *, affinity: bool) -> None:
        self._ranks = ranks
        self._waiting = waiting
        self._homes = Homes() if affinity else None

    def choose(self, session: bytes) -> int:
        """The rank for a turn of this conversation. Raises NotReadyError when no rank is ready."""
        least = self.least_loaded()
        if self._homes is None:
            return least
        home = self._homes.find(session)
        index = least if home is None or not self._acceptable(home, least) else home
        self._homes.settle(session, index)
        return index

    def least_loaded(self) -> int:
        """The ready rank with the least prompt work before it, then the fewest requests, then the lowest index."""
        ready = [rank.index for rank in self._ranks if rank.ready]
        if not ready:
            states = ", ".join(f"rank {rank.index} {rank.state}" for rank in self._ranks)
            raise NotReadyError(f"no engine rank is ready ({states})")
        return min(ready, key=self.work)

    def work(self, index: int) -> tuple[int, int]:
        """Prompt tokens and requests before a rank or in it."""
        requests, tokens = self._waiting(index)
        rank = self._ranks[index]
        return rank.pending_tokens + tokens, rank.load + requests

    def _acceptable(self, home: int, least: int) -> bool:
        if not self._ranks[home].ready:
            return False
        tokens, requests = self.work(home)
        least_tokens, least_requests = self.work(least)
        return tokens <= least_tokens + MAX_EXTRA_TOKENS and requests <= least_requests + MAX_EXTRA_REQUESTS
