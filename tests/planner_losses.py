"""What befalls a planner and its slow oracle: lost ranks, bad pages, resets, the scrubber; invariants after each step.

The start of `tests/planner_machine.py`, which adds what is asked of them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.keys import root
from hicache.look import Look
from hicache.plan import Planner, Rules
from hicache.shape import PoolShape
from tests.cache_invariants import check_planner
from tests.cache_oracle import Oracle, State

RANKS = st.integers(0, 1)
# What ends much at once is rare, or nothing ever gets full.
SELDOM = st.integers(0, 11).map(lambda roll: roll == 7)
RULES = [
    Rules(keep_tokens=1, first_state=0, state_window=0, has_states=False),
    Rules(keep_tokens=140, first_state=0, state_window=0, has_states=False),
    Rules(keep_tokens=1, first_state=128, state_window=10_000, has_states=True),
    Rules(keep_tokens=140, first_state=256, state_window=300, has_states=True),
]


class PlannerLosses(RuleBasedStateMachine):
    """One planner and its oracle, and what they lose."""

    planner: Planner
    oracle: Oracle

    @initialize(pages=st.integers(1, 12), states=st.integers(0, 4), rules=st.sampled_from(RULES))
    def start(self, pages: int, states: int, rules: Rules) -> None:
        self.planner = Planner(PoolShape(pages, 4096, states, 512), rules, verify_loads=True)
        self.oracle = Oracle(pages, states, rules)
        self.epoch = 0
        self.looks: list[tuple[Look, str, int]] = []
        self.asked: list[tuple[bytes, str]] = []
        self.known: set[bytes] = set()
        self.first: dict[str, int] = {}  # letter -> slot of the first page stored last
        self.scrubbed: dict[int, list[Any]] = {}
        self.scrubbed_state: State | None = None

    def root(self, caller: bytes) -> bytes:
        return root(caller, bytes([self.epoch]))

    def pick(self, data: st.DataObject, rank: int, **due: bool) -> int | None:
        names = [
            name
            for name, plan in self.oracle.plans.items()
            if plan.rank == rank and all(getattr(plan, key) == value for key, value in due.items())
        ]
        return data.draw(st.sampled_from(names)) if names else None

    # ---- losses ----

    @rule(rank=RANKS, now=SELDOM)
    def drop_rank(self, rank: int, now: bool) -> None:
        if not now:
            return
        self.planner.drop_rank(rank)
        for name in [name for name, plan in self.oracle.plans.items() if plan.rank == rank]:
            told = self.oracle.plans[name].told
            self.oracle.close(name)
            assert all(told)

    @rule(data=st.data(), now=SELDOM)
    def invalidate(self, data: st.DataObject, now: bool) -> None:
        if not now:
            return
        slot = data.draw(st.integers(0, self.oracle.total - 1))
        self.planner.invalidate(slot)
        for page in [page for page in self.oracle.pages if page.slot == slot]:
            self.oracle.doom(page)

    @rule(now=SELDOM)
    def reset(self, now: bool) -> None:
        if not now:
            return
        assert self.planner.reset() == self.oracle.reset()
        self.epoch += 1
        self.known.clear()

    @rule()
    def scrub(self) -> None:
        got = self.planner.scrub.next_to_scrub()
        if got is not None:
            path = next(page for page in self.oracle.pages if page.slot == got[0]).path()
            assert path[-1].owner is None
            self.oracle.pin(path)
            self.scrubbed[got[0]] = path

    @precondition(lambda self: self.scrubbed)
    @rule(bad=SELDOM)
    def scrub_done(self, bad: bool) -> None:
        slot, path = self.scrubbed.popitem()
        self.planner.scrub.done(slot, not bad)
        if bad:
            self.oracle.doom(path[-1])
        for page in path:
            page.loose = True  # it may have lost its place while it was held
        self.oracle.unpin(path, used=False)

    @precondition(lambda self: self.scrubbed_state is None)
    @rule()
    def scrub_state(self) -> None:
        ready = [state for state in self.oracle.states if state.owner is None and not state.dropped]
        got = self.planner.scrub_states.next_to_scrub()
        assert (got is not None) == bool(ready)
        if got is not None:
            (self.scrubbed_state,) = (state for state in ready if (state.slot, 9) == got)

    @precondition(lambda self: self.scrubbed_state is not None)
    @rule(bad=SELDOM)
    def scrub_state_done(self, bad: bool) -> None:
        state, self.scrubbed_state = self.scrubbed_state, None
        assert state is not None
        assert self.planner.scrub_states.done(state.slot, not bad) == (not state.dropped)
        if bad and not state.dropped:
            self.oracle.drop_state(state)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "planner"):
            check_planner(self.planner)
            assert self.planner.pages_used == len(self.oracle.pages)
            assert self.planner.states_used == len(self.oracle.states)
            assert self.planner.index.room == self.oracle.room()
