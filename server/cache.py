"""The host prefix cache as the server sees it (step 4 of a request's path): looks, plans, answers, faults, reset.

A border around `hicache/plan.py`: whatever fails in there costs a request its cached tokens and nothing else, and
three faults turn the cache off for good. Runs on the event loop's thread. What is cached lies under a root of its
caller, the model and the pages' layout, so nobody ever meets another caller's pages.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hicache import keys
from hicache.plan import Look, Planner, RankCounts, Reason, Rules
from hicache.shape import PoolShape
from ipc.errors import IpcError
from ipc.messages import CacheForget, CacheLoaded, CacheOffer, CachePlan, CacheStore, CacheStored, Facts, PoolFds
from server.pool import SharedPool
from server.rank import Rank
from server.reuse import FAILED, Reuse
from server.trust import State, Trust
from server.work import Work

log = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32


@dataclass(slots=True)
class Prospect:
    """What the cache has of one prompt, before it is submitted."""

    tokens: int  # that would have to be computed now
    reuse: Reuse
    look: Look | None = None  # None: the prompt is not cached and will not be


@dataclass(slots=True)
class TierCounts:
    """Prompt tokens that were looked up, and where they were found."""

    queries: int = 0
    device_hits: int = 0
    host_hits: int = 0


class Usage(NamedTuple):
    """Slots of the pool."""

    pages_used: int
    pages_total: int
    states_used: int
    states_total: int


@dataclass(frozen=True, slots=True)
class _Open:
    """A submitted plan whose rank has not told yet what it loaded."""

    rank: int
    prompt_tokens: int
    planned_tokens: int  # to be reused
    bypassed: bool
    reuse: Reuse


class Cache:
    """The one cache of all ranks."""

    def __init__(self, ranks: Sequence[Rank], pool: SharedPool | None = None, *, verify_loads: bool = False) -> None:
        """Without a pool it is off."""
        self.trust = Trust(State.OFF if pool is None else State.STARTING)
        self.tiers = [TierCounts() for _ in ranks]
        self._ranks = ranks
        self._pool = pool
        self._verify_loads = verify_loads
        self._planner: Planner | None = None
        self._open: dict[int, _Open] = {}
        self._storing: dict[int, int] = {}  # plan -> its rank, until it has told what it stored
        self.scrubbed_pages = self.scrubbed_states = 0
        self._epoch = 0
        self._identity: tuple[bytes, ...] = ()
        self._keep_tokens = 1
        if pool is not None:
            pool.on_open = self.open

    @property
    def on(self) -> bool:
        """Whether prompts are looked up."""
        return self.trust.state is State.ON

    # ---- its start ----

    @property
    def fds(self) -> PoolFds | None:
        """What ranks inherit; None: they need not wait for a pool."""
        return None if self._pool is None else self._pool.fds

    def rank_loaded(self, rank: Rank, facts: Facts) -> None:
        """A rank has its model and waits for the pool."""
        assert self._pool is not None  # only a rank that inherited one waits for it
        self._pool.rank_loaded(rank, facts)

    def open(self, shape: PoolShape, facts: Facts) -> None:
        """The pool is there: look prompts up from now on."""
        rules = Rules(facts.keep_tokens, facts.first_state, facts.state_window, facts.state_bytes > 0)
        self._keep_tokens = facts.keep_tokens
        self._planner = Planner(shape, rules, verify_loads=self._verify_loads)
        numbers = f"{facts.page_bytes} {facts.state_bytes} {facts.keep_tokens}"
        # The keys of one server process mean nothing to anybody else, so nobody can make two prompts meet.
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._identity = (secret, facts.layout_digest.encode(), numbers.encode())
        self.trust.state = State.ON

    # ---- a request's way in ----

    def look(self, work: Work) -> Prospect:
        """What a prompt would find now. Takes nothing."""
        planner, tokens = self._planner, len(work.ids)
        if planner is None or not self.on:
            return Prospect(tokens, Reuse(str(self.trust.state)))
        hint = work.caller.encode() + work.session
        look = self.trust.guarded("look", lambda: planner.look(self._root(work.caller), work.ids, hint))
        if look is None:
            return Prospect(tokens, Reuse(FAILED))
        if not work.reuse:
            return Prospect(tokens, Reuse(str(Reason.BYPASSED)), look)
        return Prospect(look.uncached_tokens, Reuse(str(look.reason)), look)

    def plan(self, rank: int, prospect: Prospect, work: Work) -> CachePlan | None:
        """Pin what will be loaded and reserve what will be stored. The caller submits the plan or withdraws it."""
        planner, look = self._planner, prospect.look
        if planner is None or look is None:
            return None
        if not self.on:  # any more
            prospect.tokens, prospect.reuse.why = len(work.ids), str(self.trust.state)
            return None
        plan = self.trust.guarded("plan", lambda: planner.plan(rank, look, reuse=work.reuse))
        if plan is not None:
            # What was looked up may have been stored or evicted since.
            prospect.tokens, prospect.reuse.why = look.uncached_tokens, str(look.reason)
            opened = _Open(rank, len(work.ids), look.cached_tokens, not work.reuse, prospect.reuse)
            self._open[plan.plan] = opened
            if plan.store or plan.store_states:
                self._storing[plan.plan] = rank
        return plan

    def withdraw(self, plan: CachePlan | CacheStore) -> None:
        """The plan never reached its rank."""
        planner = self._planner
        self._open.pop(plan.plan, None)
        self._storing.pop(plan.plan, None)
        if planner is not None:
            self.trust.guarded("withdraw", lambda: planner.withdraw(plan.plan))

    def owner(self, plan: int) -> int | None:
        """The rank that is storing for this plan; None once it has."""
        return self._storing.get(plan)

    def settled(self, plan: int, callback: Callable[[], None]) -> None:
        """Call back once what that plan stores is there, or will not be."""
        if self._planner is None:
            callback()
        else:
            self._planner.settled(plan, callback)

    # ---- what ranks say ----

    def loaded(self, rank: int, event: CacheLoaded) -> None:
        """A request knows what it reused."""
        opened = self._open.pop(event.plan, None)
        if opened is not None and event.device_tokens + event.host_tokens > opened.prompt_tokens:
            self.trust.fault(f"rank {rank} says that it reused more than a prompt has: {event}")
        elif opened is not None:
            self._count(opened, event)
        if event.error or event.bad >= 0:
            self.trust.fault(f"rank {rank} could not load pages: {event.error or 'a checksum is wrong'}")
        planner = self._planner
        if planner is not None:
            self.trust.guarded("loaded", lambda: planner.loaded(rank, event))

    def stored(self, rank: int, event: CacheStored) -> None:
        """What a plan stored may be looked up, the rest of its slots is free."""
        self._storing.pop(event.plan, None)
        if event.error:
            self.trust.fault(f"rank {rank} could not store pages: {event.error}")
        planner = self._planner
        if planner is not None:
            self.trust.guarded("stored", lambda: planner.stored(rank, event))

    def offered(self, rank: int, event: CacheOffer, send: Callable[[CacheStore], bool]) -> None:
        """Send slots for the pages of an answer, once those before them are stored; a full ring loses them."""
        planner = self._planner
        if planner is None or not self.on:
            return
        before = self.trust.guarded("storing", lambda: planner.storing(event.parent))
        if before is not None:
            self.settled(before, lambda: self._answer(planner, rank, event, send))
        else:
            self._answer(planner, rank, event, send)

    def _answer(self, planner: Planner, rank: int, event: CacheOffer, send: Callable[[CacheStore], bool]) -> None:
        command = self.trust.guarded("offered", lambda: planner.offered(rank, event))
        if command is None:
            return
        self._storing[command.plan] = rank
        if not send(command):
            self.withdraw(command)

    def drop_rank(self, rank: int) -> None:
        """Its process is gone: nobody reads or writes what it had pinned or reserved."""
        self._open = {plan: opened for plan, opened in self._open.items() if opened.rank != rank}
        self._storing = {plan: owner for plan, owner in self._storing.items() if owner != rank}
        planner = self._planner
        if planner is not None:
            self.trust.guarded("drop_rank", lambda: planner.drop_rank(rank))

    # ---- checks in the background ----

    def next_to_scrub(self) -> tuple[int, int] | None:
        """Pin a page whose checksum is to be compared: (slot, checksum). Answer with `scrubbed`."""
        planner = self._planner
        if planner is None or not self.on:
            return None
        return self.trust.guarded("next_to_scrub", planner.scrub.next_to_scrub)

    def scrubbed(self, slot: int, *, right: bool) -> None:
        """The page was compared; a wrong one is found by nobody any more."""
        self.scrubbed_pages += 1
        if not right:
            self.trust.fault(f"the page in slot {slot} is not what was stored")
        planner = self._planner
        if planner is not None:
            self.trust.guarded("scrubbed", lambda: planner.scrub.done(slot, right))

    def next_state_to_scrub(self) -> tuple[int, int] | None:
        """A state whose checksum is to be compared: (slot, checksum). Answer with `scrubbed_state`."""
        planner = self._planner
        if planner is None or not self.on:
            return None
        return self.trust.guarded("next_state_to_scrub", planner.scrub_states.next_to_scrub)

    def scrubbed_state(self, slot: int, *, right: bool) -> None:
        """The state was compared; a wrong one is found by nobody any more. It may have gone meanwhile."""
        self.scrubbed_states += 1
        planner = self._planner
        if planner is None:
            return
        same = self.trust.guarded("scrubbed_state", lambda: planner.scrub_states.done(slot, right))
        if same and not right:
            self.trust.fault(f"the state in slot {slot} is not what was stored")

    # ---- what people see and do ----

    def reset(self) -> int:
        """Nothing that is cached now is found again. Returns the pages that were dropped at once."""
        self._epoch += 1
        for rank in self._ranks:
            if rank.ready and rank.link is not None:
                try:
                    # Only to free memory sooner: pages under the old root are found by nobody, so a full ring is fine.
                    rank.link.send(CacheForget())
                except IpcError as error:  # the supervisor's to mend
                    log.warning("rank %d was not told to forget its pages: %s", rank.index, error)
        planner = self._planner
        dropped = None if planner is None else self.trust.guarded("reset", planner.reset)
        log.info("prefix cache reset: %d pages dropped", dropped or 0)
        return dropped or 0

    def counts(self, rank: int) -> RankCounts | None:
        """A rank's counters; None where there is no pool."""
        return None if self._planner is None else self._planner.rank_counts(rank)

    def cache_counts(self, rank: int) -> tuple[int, int, int]:
        """Prompt tokens that a rank's requests could have reused, found on its device, copied from the host."""
        tiers = self.tiers[rank]
        return tiers.queries, tiers.device_hits, tiers.host_hits

    def usage(self) -> Usage | None:
        """How full the pool is; None where there is none."""
        planner = self._planner
        if planner is None:
            return None
        shape = planner.shape
        return Usage(planner.pages_used, shape.pages, planner.states_used, shape.states)

    def _why(self, opened: _Open) -> str:
        """Why no more than the rank has told was reused, where the plan's own reason no longer holds."""
        cached, pages = opened.reuse.cached_tokens, opened.prompt_tokens // keys.PAGE_TOKENS
        if cached >= pages * keys.PAGE_TOKENS:
            return str(Reason.FULL)
        most = (opened.prompt_tokens - self._keep_tokens) // keys.PAGE_TOKENS * keys.PAGE_TOKENS
        return str(Reason.KEEP_TOKENS) if cached >= most else opened.reuse.why

    def _root(self, caller: str) -> bytes:
        return keys.root(*self._identity, caller.encode(), self._epoch.to_bytes(8, "little"))

    def _count(self, opened: _Open, event: CacheLoaded) -> None:
        reuse, tiers = opened.reuse, self.tiers[opened.rank]
        reuse.device_tokens, reuse.host_tokens = event.device_tokens, event.host_tokens
        reuse.deferred, reuse.error = event.deferred, event.error
        if event.error or event.bad >= 0:
            reuse.why = FAILED
        elif reuse.cached_tokens > opened.planned_tokens:  # the device had more than the host
            reuse.why = self._why(opened)
        if not opened.bypassed:
            tiers.queries += opened.prompt_tokens
            tiers.device_hits += event.device_tokens
            tiers.host_hits += event.host_tokens
