"""Page boundaries whose states a model still has at the end of some tokens. Pure arithmetic.

The planner chooses by it what a prompt stores, an engine what an answer leaves.
"""

from __future__ import annotations

from hicache.keys import PAGE_TOKENS


def last_boundaries(tokens: int, behind: int, *, first_state: int, window: int, most: int) -> list[int]:
    """The last boundaries behind `behind` pages, at most so many, in pages, the last one first.

    `first_state` and `window` are of `ipc.messages.Facts`, in tokens.
    """
    lowest = max(first_state, tokens - window)
    first, last = max(-(-lowest // PAGE_TOKENS), behind + 1), tokens // PAGE_TOKENS
    return list(range(last, first - 1, -1))[:most]
