"""Rank pairs before one real prefix cache: the test says what each rank loaded and stored, and no page has bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from hicache.keys import PAGE_TOKENS
from hicache.shape import PoolShape
from ipc.messages import CacheLoaded, CachePlan, CacheStored, Facts, Finish, Submit
from server.cache import Cache
from server.collect import Collector
from server.submit import Submitter
from server.work import Work
from tests.rank_pair import FACTS, NO_RECORDS, SHAPE, RankPair, rank_pair, record, submitter_of, work_of

PAGES: Final = 64
LONG: Final = msgspec.structs.replace(FACTS, max_model_len=2**16)


@dataclass
class CachedRanks:
    """Ranks, their cache and the way in."""

    pairs: Sequence[RankPair]
    cache: Cache
    submitter: Submitter
    collectors: Sequence[Collector]

    def drain(self) -> None:
        """Have the server take all that the ranks said."""
        for collector in self.collectors:
            collector.drain_rest()

    def submitted(self, rank: int = 0) -> Submit:
        """The newest request of a rank."""
        return [command for command in self.pairs[rank].commands() if isinstance(command, Submit)][-1]

    def finish(self, submit: Submit, rank: int = 0, *, device_tokens: int = 0) -> CachePlan:
        """The rank did all that the plan says: loaded, answered with one token, stored."""
        plan = submit.cache
        assert plan is not None
        loaded = CacheLoaded(plan.plan, device_tokens, host_tokens=slots(plan.load) * PAGE_TOKENS)
        end = record(submit.slot, submit.generation, 5, finish=Finish.LENGTH)
        self.pairs[rank].engine.publish(end, [loaded])
        if plan.store or plan.store_states:
            self.store(plan, rank)
        self.drain()
        return plan

    def store(self, plan: CachePlan, rank: int = 0, pages: int | None = None) -> None:
        """The rank stored so many pages of what the plan says; None is all, with its states."""
        count = slots(plan.store) if pages is None else pages
        states = tuple((slot, 1) for _, slot in plan.store_states) if pages is None else ()
        sums = np.arange(count, dtype=np.uint64).tobytes()
        self.pairs[rank].engine.publish(NO_RECORDS, [CacheStored(plan.plan, count, sums, states)])
        self.drain()

    def inflight(self) -> int:
        """Plans that are not answered."""
        found = [self.cache.counts(pair.rank.index) for pair in self.pairs]
        return sum(counts.inflight for counts in found if counts is not None)


def slots(raw: bytes) -> int:
    """How many host slots a plan names."""
    return len(np.frombuffer(raw, np.uint32))


def prompt(pages: float, first: int = 1) -> Work:
    """A prompt of so many pages; those of another `first` share nothing."""
    ids = (np.arange(int(pages * PAGE_TOKENS)) * 7 + first) % FACTS.vocab_size
    return work_of(*ids.tolist())


@contextmanager
def cached_ranks(count: int = 1, *, pages: int = PAGES, states: int = 0, **facts: Any) -> Iterator[CachedRanks]:
    """That many ready ranks; needs a running loop."""
    told: Facts = msgspec.structs.replace(LONG, **facts)
    with ExitStack() as stack:
        pairs = [stack.enter_context(rank_pair(index=index, shape=SHAPE)) for index in range(count)]
        cache = Cache([pair.rank for pair in pairs])
        cache.open(PoolShape(pages, told.page_bytes, states, told.state_bytes), told)
        for pair in pairs:
            pair.cache, pair.rank.facts = cache, told
        submitter = submitter_of([pair.rank for pair in pairs], cache=cache)
        yield CachedRanks(pairs, cache, submitter, [pair.collector() for pair in pairs])
