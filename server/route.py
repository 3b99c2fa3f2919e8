"""Which rank takes a request: step 5 of a request's path. Knows only what the ranks hold, not the request."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import NotReadyError
from server.rank import Rank, RankState


def pick(ranks: Sequence[Rank]) -> Rank:
    """The ready rank that holds the fewest requests, the first of equals. Raises NotReadyError."""
    ready = [rank for rank in ranks if rank.state is RankState.READY]
    if not ready:
        states = ", ".join(f"rank {rank.index} {rank.state}" for rank in ranks)
        raise NotReadyError(f"no engine rank is ready ({states})")
    return min(ready, key=lambda rank: rank.slots.taken)
