"""What each request loads from the host pool and stores into it, from its submit to its rank's answers.

Promises: every pin and every reservation belongs to one plan of one rank, and goes when that plan is answered or
withdrawn, or its rank dropped. A page is stored by one plan at a time. Nothing here waits; who wants to asks `settled`.
On the server's loop, one thread. Knows nothing of asyncio, HTTP or what a page's bytes are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from hicache.boundaries import last_boundaries
from hicache.buckets import Slots, Words, key_words
from hicache.counts import RankCounts
from hicache.hold import NO_SUMS, Hold
from hicache.index import PageIndex
from hicache.keys import PAGE_TOKENS
from hicache.look import Look, Looker, Reason, Rules
from hicache.memo import Memo
from hicache.offers import Offer
from hicache.pages import NO_PARENT, NO_SLOTS, NO_STATE, Ids
from hicache.scrub import PageWalk, StateWalk
from hicache.shape import PoolShape
from hicache.states import NOBODY
from ipc.messages import CacheLoaded, CacheOffer, CachePlan, CacheStore, CacheStored

__all__ = ["Look", "Planner", "PoolShape", "RankCounts", "Reason", "Rules"]

# States that one prompt stores: the boundaries nearest to its end, so that a follow-up that changes little of it hits.
STATES_PER_PROMPT: Final = 4
SUM_BYTES: Final = 8
# Roots whose chains may be continued by an offer: one a caller, so far more than are busy at a time.
KNOWN_ROOTS: Final = 4096

log = logging.getLogger(__name__)


class Planner:
    """One pool's index and all plans on it."""

    def __init__(self, shape: PoolShape, rules: Rules, *, verify_loads: bool = False) -> None:
        self.shape: Final = shape
        self.rules: Final = rules
        self.index: Final = PageIndex(shape.pages, shape.states)
        self.scrub: Final = PageWalk(self.index)
        self.scrub_states: Final = StateWalk(self.index)
        self.counts: Final[dict[int, RankCounts]] = {}
        self._verify_loads: Final = verify_loads
        self._looker: Final = Looker(self.index, rules)
        self._memo: Final = Memo()
        self._holds: Final[dict[int, Hold]] = {}
        self._names: Final = itertools.count(1)
        self._roots: Final[dict[bytes, None]] = {}

    @property
    def pages_used(self) -> int:
        """Slots that hold a page or are reserved for one."""
        return self.index.used

    @property
    def states_used(self) -> int:
        """Likewise of states."""
        return self.index.states.used

    def rank_counts(self, rank: int) -> RankCounts:
        """The counters of one rank."""
        counts = self.counts.get(rank)
        if counts is None:
            counts = self.counts[rank] = RankCounts()
        return counts

    # ---- on the way in ----

    def look(self, root: bytes, ids: Ids, hint: bytes = b"") -> Look:
        """What of a prompt's `ids` `[n]` can be reused under `root`. Changes nothing; keeps `ids`.

        `hint` names the conversation: what its last plan used is tried first, so that only new pages are hashed.
        """
        look = Look(root, np.ascontiguousarray(ids, np.int32), hint, ready=self._memo.get(hint))
        self._looker.fill(look)
        return look

    def plan(self, rank: int, look: Look, *, reuse: bool) -> CachePlan:
        """Pin what is loaded, reserve what is stored. `look` says afterwards what the plan was made from."""
        if look.version != self.index.version:
            self._looker.fill(look)
        if not reuse:
            look.bypass()
        self._know(look.root)
        hold = self._open(rank, look.ready)
        load = look.cached_tokens // PAGE_TOKENS
        state = int(self.index.pages.state[look.ready[load - 1]]) if load and self.rules.has_states else NO_STATE
        hold.begin_load(load, state)
        hold.prompt_tokens = len(look.ids) if reuse else 0
        evicted = self.index.evicted.total, self.index.states.evicted
        found, words = len(look.ready), key_words(look.keys)
        if found < len(look.pages):
            self._reserve(hold, look.root, words[found:], look.pages[found:], being_stored=look.being_stored)
        states = hold.reserve_states(self._boundaries(len(look.ids), load))
        # A short prompt beside a conversation (a title, a summary) is no reason to forget where that lies.
        if look.hint and len(look.pages):
            self._memo.put(look.hint, np.concatenate([hold.path, hold.slots]))
        self._count_evicted(rank, *evicted)
        return self._message(hold, look, states, reuse=reuse)

    def withdraw(self, plan_id: int) -> None:
        """The plan was never sent. Does nothing if its rank was dropped meanwhile."""
        if hold := self._holds.get(plan_id):
            self._end(hold)

    def settled(self, plan_id: int, callback: Callable[[], None]) -> None:
        """Call back once that plan stores nothing any more, whatever came of it; at once if it is so already."""
        hold = self._holds.get(plan_id)
        if hold is not None and hold.storing:
            hold.waiters.append(callback)
        else:
            callback()

    # ---- a rank's answers; one to a plan that is not open, or another rank's, is ignored ----

    def loaded(self, rank: int, event: CacheLoaded) -> None:
        """What a request reused; a page that was found bad is never found again."""
        hold = self._holds.get(event.plan)
        if hold is None or hold.rank != rank or not hold.loading:
            return
        self._count_load(hold, event)
        hold.end_load(event.bad)
        if not hold.storing:
            self._end(hold)

    def stored(self, rank: int, event: CacheStored) -> None:
        """What of a plan's pages and states is there now; the rest of its slots are free."""
        hold = self._holds.get(event.plan)
        if hold is None or hold.rank != rank or not hold.storing:
            return
        counts, error, sums = self.rank_counts(rank), event.error, NO_SUMS
        if len(event.sums) != SUM_BYTES * event.pages or event.pages > len(hold.slots):
            error = f"{event.pages} pages with {len(event.sums)} bytes of sums for {len(hold.slots)} slots"
        else:
            sums = np.frombuffer(event.sums, np.uint64)
        if error:
            counts.errors += 1
            log.warning("rank %d could not store all of plan %d: %s", rank, event.plan, error)
        pages, states = hold.end_store(sums, event.states)
        counts.stores += bool(pages or states)
        counts.pages_stored += pages
        counts.states_stored += states
        if hold.loading:
            self._tell(hold)
        else:
            self._end(hold)

    def offered(self, rank: int, event: CacheOffer) -> CacheStore | None:
        """Where what is offered goes; None: it is here or on its way, is too much, or nothing leads to it."""
        try:
            offer = Offer.proven(event)
        except ValueError as error:
            self.rank_counts(rank).errors += 1
            log.warning("rank %d offered %s", rank, error)
            return None
        path = NO_SLOTS if offer.parent in self._roots else self.index.find(offer.parent)
        if not path.size and offer.parent not in self._roots:
            return None
        return self._accept(rank, offer, path)

    def storing(self, parent: bytes) -> int | None:
        """The plan that is storing the page of this key: an offer behind it is declined until that has `settled`."""
        slot = self.index.locate(parent)
        owner = int(self.index.pages.owner[slot]) if slot != NO_PARENT else NOBODY
        return None if owner == NOBODY else owner

    def drop_rank(self, rank: int) -> None:
        """Its process is gone: nobody reads or writes the slots of its plans any more."""
        lost = [hold for hold in self._holds.values() if hold.rank == rank]
        for hold in lost:
            self._close(hold)
        for hold in lost:  # who was waiting may plan at once, and then finds all of it free
            self._tell(hold)

    # ---- the whole ----

    def reset(self) -> int:
        """Find nothing of today again; what is idle is free at once, the rest when its plan ends. Returns pages freed.

        The caller changes its roots, so that chains of today cannot go on.
        """
        self._roots.clear()
        self._memo.clear()
        return self.index.reset()

    def invalidate(self, slot: int) -> None:
        """A page's bytes are wrong: neither it nor what hangs on it is ever found again."""
        self.index.invalidate(slot)

    # ---- parts of these ----

    def _open(self, rank: int, path: Slots) -> Hold:
        hold = Hold(self.index, next(self._names), rank, path)
        self._holds[hold.name] = hold
        self.rank_counts(rank).inflight += 1
        return hold

    def _end(self, hold: Hold) -> None:
        self._close(hold)
        self._tell(hold)

    def _close(self, hold: Hold) -> None:
        del self._holds[hold.name]
        hold.close()
        self.rank_counts(hold.rank).inflight -= 1

    def _tell(self, hold: Hold) -> None:
        waiters, hold.waiters = hold.waiters, []
        for callback in waiters:
            callback()

    def _know(self, root: bytes) -> None:
        self._roots.pop(root, None)
        self._roots[root] = None
        if len(self._roots) > KNOWN_ROOTS:
            del self._roots[next(iter(self._roots))]

    def _reserve(self, hold: Hold, root: bytes, keys: Words, pages: Ids, *, being_stored: bool) -> None:
        counts = self.rank_counts(hold.rank)
        if being_stored:
            counts.store_skipped += 1
        elif not hold.reserve_pages(root, keys, pages):
            counts.store_skipped += 1
            counts.store_no_room += 1
        elif hold.parent == NO_PARENT:
            self._looker.first_pages.add(pages[0], int(hold.slots[0]))

    def _accept(self, rank: int, offer: Offer, path: Slots) -> CacheStore | None:
        after, words = int(path[-1]) if path.size else NO_PARENT, offer.words
        ready, reserved = self.index.match(offer.parent, words, offer.pages, after)
        found = len(ready)
        # Of a model with states, pages without any help nobody; and those that are here may lack theirs.
        if not (offer.states if self.rules.has_states else found < len(offer.pages)):
            return None
        hold = self._open(rank, np.concatenate([path, ready]))
        evicted = self.index.evicted.total, self.index.states.evicted
        if found < len(offer.pages):
            self._reserve(hold, offer.parent, words[found:], offer.pages[found:], being_stored=bool(reserved.size))
        states = {len(path) + pages: name for pages, name in offer.states.items()}
        kept = hold.reserve_states(sorted(states, reverse=True))
        self._count_evicted(rank, *evicted)
        if not hold.storing:
            self._end(hold)
            return None
        store = hold.slots.astype(np.uint32).tobytes()
        keys = offer.keys_from(found) if store else b""
        return CacheStore(hold.name, keys, store, tuple((states[pages], slot) for pages, slot in kept))

    def _boundaries(self, tokens: int, load: int) -> list[int]:
        """Boundaries whose states a prompt stores, in pages, the last one first: the one most likely to be hit.

        The engine never has those before the `load` pages that it need not compute.
        """
        if not self.rules.has_states:
            return []
        rules = self.rules
        return last_boundaries(
            tokens, load, first_state=rules.first_state, window=rules.state_window, most=STATES_PER_PROMPT
        )

    def _message(self, hold: Hold, look: Look, states: list[tuple[int, int]], *, reuse: bool) -> CachePlan:
        load, sums = hold.path[: hold.load], b""
        if self._verify_loads:
            sums = self.index.pages.sums[load].tobytes()
        state_sum = self.index.states.sums[hold.load_state] if hold.load_state != NO_STATE else 0
        return CachePlan(
            plan=hold.name,
            root=look.root,
            keys=look.keys,
            reuse=reuse,
            load=load.astype(np.uint32).tobytes(),
            load_sums=sums,
            load_state=hold.load_state,
            load_state_sum=state_sum,
            store_from=len(hold.path),
            store=hold.slots.astype(np.uint32).tobytes(),
            store_states=tuple(states),
        )

    def _count_load(self, hold: Hold, event: CacheLoaded) -> None:
        counts, reused = self.rank_counts(hold.rank), event.device_tokens + event.host_tokens
        if hold.prompt_tokens:
            counts.lookups += 1
            counts.lookup_tokens += hold.prompt_tokens
            counts.hits += bool(reused)
            counts.hit_tokens += reused
        counts.deferred += event.deferred
        counts.pages_loaded += event.host_tokens // PAGE_TOKENS
        counts.states_loaded += bool(reused and hold.load_state != NO_STATE)
        if event.error or event.bad >= 0:
            counts.errors += 1
            log.warning(
                "rank %d could not load all of plan %d: %s",
                hold.rank,
                hold.name,
                event.error or f"page {event.bad} is bad",
            )

    def _count_evicted(self, rank: int, pages: int, states: int) -> None:
        """What was evicted since these totals."""
        counts = self.rank_counts(rank)
        counts.evicted_pages += self.index.evicted.total - pages
        counts.evicted_states += self.index.states.evicted - states
