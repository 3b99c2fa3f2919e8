"""A planner and its slow oracle side by side, as hypothesis drives them; all invariants are checked after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend
from hicache.look import Look, Reason
from hicache.pages import FREE, Ids
from ipc.messages import CacheLoaded, CacheOffer, CacheStored
from tests.cache_oracle import Plan
from tests.planner_losses import RANKS, SELDOM, PlannerLosses

LETTERS = st.text("ab", max_size=6)
LONG = st.text("ab", min_size=2, max_size=7)
MORE = st.text("ab", min_size=1, max_size=3)
TAILS = st.sampled_from([1, 0, 100])
HINTS = st.sampled_from([b"", b"talk"])
CALLERS = st.sampled_from([b"me", b"you"])
CONTENT = {letter: np.random.default_rng(ord(letter)).integers(0, 99, PAGE_TOKENS, np.int32) for letter in "ab"}


def prompt(letters: str, tail: int = 0) -> Ids:
    """Token ids of these pages and of a part of one more."""
    return np.concatenate([*(CONTENT[letter] for letter in letters), np.full(tail, 7, np.int32)]).astype(np.int32)


class PlannerMachine(PlannerLosses):
    """One planner and its oracle; plans and looks wait in lists for what happens to them."""

    # ---- looks and plans ----

    @rule(caller=CALLERS, letters=LETTERS, tail=TAILS, hint=HINTS)
    def look(self, caller: bytes, letters: str, tail: int, hint: bytes) -> None:
        look = self.planner.look(self.root(caller), prompt(letters, tail), hint)
        self.compare(look, letters)
        self.looks.append((look, letters, self.epoch))

    def compare(self, look: Look, letters: str) -> None:
        cached, reason, waits_for, twin = self.oracle.look(look.root, letters, len(look.ids))
        if reason is Reason.NEVER_STORED and not look.ready.size and self.is_others(letters[0]):
            reason = Reason.OTHER_NAMESPACE
        assert (look.cached_tokens, look.reason) == (cached, reason)
        assert (look.waits_for, look.twin_tokens) == (waits_for, twin)
        assert look.uncached_tokens == len(look.ids) - cached
        assert look.keys == extend(look.root, look.ids)

    def is_others(self, letter: str) -> bool:
        slot = self.first.get(letter)
        return any(
            page.slot == slot and page.letter == letter and not (page.parent or page.doomed or page.owner)
            for page in self.oracle.pages
        )

    @rule(caller=CALLERS, letters=LETTERS, tail=TAILS, hint=HINTS, rank=RANKS)
    def request(self, caller: bytes, letters: str, tail: int, hint: bytes, rank: int) -> None:
        self.look(caller, letters, tail, hint)
        self.plan_from(*self.looks.pop()[:2], rank, reuse=True)

    @rule(caller=CALLERS, letters=LONG, tail=TAILS, hint=HINTS, rank=RANKS)
    def whole_request(self, caller: bytes, letters: str, tail: int, hint: bytes, rank: int) -> None:
        self.asked.append((caller, letters))
        self.request(caller, letters, tail, hint, rank)
        name = max(self.oracle.plans)
        self.answer_load(name, -1)
        if name in self.oracle.plans:
            plan = self.oracle.plans[name]
            self.answer_store(name, len(plan.stored), [state.slot for state in plan.states])

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.text("ab", max_size=2), hint=HINTS, rank=RANKS, ends=st.booleans())
    def next_turn(self, data: st.DataObject, more: str, hint: bytes, rank: int, ends: bool) -> None:
        caller, letters = data.draw(st.sampled_from(self.asked))
        (self.whole_request if ends else self.request)(caller, letters[:6] + more, 1, hint, rank)

    @precondition(lambda self: self.looks)
    @rule(data=st.data(), rank=RANKS, reuse=st.booleans())
    def plan(self, data: st.DataObject, rank: int, reuse: bool) -> None:
        look, letters, epoch = self.looks.pop(data.draw(st.integers(0, len(self.looks) - 1)))
        if epoch == self.epoch:  # else the server looks again under its new root
            self.plan_from(look, letters, rank, reuse=reuse)

    def plan_from(self, look: Look, letters: str, rank: int, *, reuse: bool) -> None:
        ready, reserved = self.oracle.found(look.root, letters)
        hit = self.oracle.look(look.root, letters, len(look.ids))[0] // PAGE_TOKENS if reuse else 0
        got = self.planner.plan(rank, look, reuse=reuse)
        self.known.add(look.root)
        assert got.load == np.array([page.slot for page in ready[:hit]], np.uint32).tobytes()
        assert (got.store_from, got.keys, got.reuse) == (len(ready), look.keys, reuse)
        assert len(got.load_sums) == 2 * len(got.load)
        state = ready[hit - 1].state if hit and self.oracle.rules.has_states else None
        assert got.load_state == (state.slot if state else -1)
        self.oracle.pin(ready)
        if state:
            state.pins += 1
        lacking = letters[len(ready) :] if not reserved else ""
        plan = self.stores(got.plan, rank, ready, lacking, top=look.root, store=got.store)
        plan.load, plan.load_state = hit, state
        wanted = self.oracle.boundaries(len(look.ids), [*ready, *plan.stored], hit)
        self.stores_states(got.plan, list(got.store_states), wanted)
        plan.storing = bool(plan.stored or plan.states)

    def stores(self, name: int, rank: int, path: list[Any], letters: str, *, top: bytes, store: bytes) -> Plan:
        """The oracle follows a plan that stores pages: which went for them, and that it is all or none."""
        slots = np.frombuffer(store, np.uint32).tolist()
        if slots:
            assert len(slots) == len(letters)
            pages = self.planner.index.pages
            free = self.oracle.total - len(self.oracle.pages)
            went = {
                page.slot
                for page in self.oracle.pages
                if not page.doomed and (pages.status[page.slot] == FREE or page.slot in slots)
            }
            lacking = max(0, len(slots) - free)
            # A bad page that comes free when the last behind it goes saves an eviction.
            assert lacking - self.oracle.evict(went) <= len(went) <= lacking
        else:
            assert not letters or len(letters) > self.oracle.room()
        plan = Plan(rank, path, self.oracle.store(name, top, path, letters if slots else "", slots), [])
        if plan.stored and not path:
            self.first[letters[0]] = slots[0]
        self.oracle.plans[name] = plan
        return plan

    @rule(rank=RANKS, caller=CALLERS, before=LETTERS, more=MORE, behind=st.sets(st.integers(1, 3)))
    def offer(self, rank: int, caller: bytes, before: str, more: str, behind: set[int]) -> None:
        stateful, top, ids = self.oracle.rules.has_states, self.root(caller), prompt(more)
        parent = (extend(top, prompt(before)) or top)[-KEY_BYTES:]
        states = [len(before) + at for at in behind if stateful and at <= len(more)]
        path, reserved = self.oracle.found(top, before + more)
        missing = (before + more)[len(path) :]
        if not (len(path) >= len(before) if before else top in self.known) or not (states if stateful else missing):
            path, missing, lacking = [], "", []
        else:
            self.oracle.pin(path)
            missing = "" if reserved or len(missing) > self.oracle.room() else missing
            have = [bool(page.state) for page in path] + [False] * len(missing)
            lacking = [at for at in sorted(states, reverse=True) if at <= len(have) and not have[at - 1]]
        told = tuple((at - len(before), 100 + at) for at in states)
        takes = bool(missing or (lacking and self.oracle.can_reserve_state()))
        got = self.planner.offered(rank, CacheOffer(parent, extend(parent, ids), ids.tobytes(), told))
        assert takes == (got is not None)
        if got is None:
            self.oracle.unpin(path)
            return
        assert got.keys == extend(top, prompt(before + more))[len(path) * KEY_BYTES :][: len(missing) * KEY_BYTES]
        plan = self.stores(got.plan, rank, path, missing, top=top, store=got.store)
        plan.loading, plan.storing = False, True
        self.stores_states(got.plan, [(name - 100, slot) for name, slot in got.states], lacking)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), rank=RANKS, more=MORE, behind=st.sets(st.integers(1, 3), min_size=1))
    def answer(self, data: st.DataObject, rank: int, more: str, behind: set[int]) -> None:
        caller, letters = data.draw(st.sampled_from(self.asked))
        self.offer(rank, caller, letters, more, behind)

    def stores_states(self, name: int, got: list[tuple[int, int]], wanted: list[int]) -> None:
        """The oracle follows a plan that stores states at these boundaries, and as many as there is room for."""
        plan = self.oracle.plans[name]
        held = [*plan.path, *plan.stored]
        for pages, slot in got:
            assert pages == wanted.pop(0)
            plan.states.append(self.oracle.reserve_state(name, held[pages - 1], slot))
        assert not wanted or not self.oracle.can_reserve_state()

    # ---- answers ----

    @rule(data=st.data(), rank=RANKS, fails=SELDOM)
    def loaded(self, data: st.DataObject, rank: int, fails: bool) -> None:
        name = self.pick(data, rank, loading=True)
        if name is not None:
            load = self.oracle.plans[name].load
            self.answer_load(name, data.draw(st.integers(0, load)) if fails and load else -1)

    def answer_load(self, name: int, bad: int) -> None:
        plan = self.oracle.plans[name]
        event = CacheLoaded(name, host_tokens=plan.load * PAGE_TOKENS, bad=bad)
        self.planner.loaded(1 - plan.rank, event)  # another rank's answer means nothing
        self.planner.loaded(plan.rank, event)
        self.oracle.end_load(plan, bad)
        self.finish(name)

    @rule(data=st.data(), rank=RANKS, fails=st.booleans())
    def stored(self, data: st.DataObject, rank: int, fails: bool) -> None:
        name = self.pick(data, rank, storing=True)
        if name is not None:
            plan = self.oracle.plans[name]
            pages = data.draw(st.integers(0, len(plan.stored))) if fails else len(plan.stored)
            states = [state.slot for state in plan.states if not fails or data.draw(st.booleans())]
            self.answer_store(name, pages, states)

    def answer_store(self, name: int, pages: int, states: list[int]) -> None:
        plan = self.oracle.plans[name]
        sums = np.arange(pages, dtype=np.uint64).tobytes()
        self.planner.stored(plan.rank, CacheStored(name, pages, sums, tuple((slot, 9) for slot in states)))
        self.oracle.end_store(plan, pages, set(states))
        self.finish(name)

    def finish(self, name: int) -> None:
        plan = self.oracle.plans[name]
        assert all(plan.told) or plan.storing
        if not plan.loading and not plan.storing:
            self.oracle.close(name)

    @rule(data=st.data(), rank=RANKS)
    def withdraw(self, data: st.DataObject, rank: int) -> None:
        name = self.pick(data, rank, loading=True)
        if name is not None:
            plan = self.oracle.plans[name]
            self.planner.withdraw(name)
            self.oracle.close(name)
            assert all(plan.told)

    @rule(data=st.data(), rank=RANKS)
    def wait(self, data: st.DataObject, rank: int) -> None:
        name = self.pick(data, rank)
        if name is None:
            self.planner.settled(10**9, lambda: None)
            return
        plan = self.oracle.plans[name]
        at = len(plan.told)
        plan.told.append(False)

        def tell() -> None:
            assert not plan.told[at]
            plan.told[at] = True

        self.planner.settled(name, tell)
        assert plan.told[at] != plan.storing
