"""Requests and a rank's answers to a planner, for its tests: prompts are letters, one a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.keys import PAGE_TOKENS, root
from hicache.look import Reason
from hicache.pages import Ids
from hicache.plan import Planner, Rules
from hicache.shape import PoolShape
from ipc.messages import CacheLoaded, CachePlan, CacheStored
from tests.cache_invariants import check_planner

MINE, YOURS = root(b"secret", b"me"), root(b"secret", b"you")
PLAIN = Rules(keep_tokens=1, first_state=0, state_window=0, has_states=False)
WITH_STATES = Rules(keep_tokens=140, first_state=256, state_window=652, has_states=True)


def planner(pages: int = 20, states: int = 0, rules: Rules = PLAIN, *, verify_loads: bool = False) -> Planner:
    """Over a pool of that size."""
    return Planner(PoolShape(pages, 4096, states, 512), rules, verify_loads=verify_loads)


def ids_of(letters: str, tail: int = 1) -> Ids:
    """One page a letter, and `tail` tokens of another."""
    pages = np.repeat(np.frombuffer(letters.encode(), np.uint8), PAGE_TOKENS)
    return np.concatenate([pages, np.zeros(tail, np.uint8)]).astype(np.int32)


def slots(blob: bytes) -> list[int]:
    """Host slots out of a message."""
    numbers: list[int] = np.frombuffer(blob, np.uint32).tolist()
    return numbers


def submit(
    cache: Planner, letters: str, *, rank: int = 0, top: bytes = MINE, tail: int = 1, reuse: bool = True
) -> CachePlan:
    """The plan of a request."""
    plan = cache.plan(rank, cache.look(top, ids_of(letters, tail)), reuse=reuse)
    check_planner(cache)
    return plan


def load(cache: Planner, plan: CachePlan, *, rank: int = 0, bad: int = -1) -> None:
    """The answer that all of a plan's pages are loaded, or that one is bad."""
    cache.loaded(rank, CacheLoaded(plan.plan, host_tokens=len(slots(plan.load)) * PAGE_TOKENS, bad=bad))
    check_planner(cache)


def finish(
    cache: Planner, plan: CachePlan, *, rank: int = 0, pages: int | None = None, states: Sequence[int] = ()
) -> None:
    """The answers that an engine gives; `states` are the slots it could store."""
    load(cache, plan, rank=rank)
    done = len(slots(plan.store)) if pages is None else pages
    sums = (100 + np.arange(done, dtype=np.uint64)).tobytes()
    if plan.store or plan.store_states:
        cache.stored(rank, CacheStored(plan.plan, done, sums, tuple((slot, 1000 + slot) for slot in states)))
    check_planner(cache)


def run(cache: Planner, letters: str, *, rank: int = 0, top: bytes = MINE) -> CachePlan:
    """A request from its submit to its end, all stored."""
    plan = submit(cache, letters, rank=rank, top=top)
    finish(cache, plan, rank=rank, states=[slot for _, slot in plan.store_states])
    return plan


def why(cache: Planner, letters: str, *, top: bytes = MINE, tail: int = 1) -> tuple[int, Reason]:
    """Pages that would be reused, and why no more."""
    look = cache.look(top, ids_of(letters, tail))
    assert look.cached_tokens + look.uncached_tokens == len(letters) * PAGE_TOKENS + tail
    return look.cached_tokens // PAGE_TOKENS, look.reason
