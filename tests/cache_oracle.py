"""The host prefix cache as a tree of small objects, slow and obvious: what `hicache.plan.Planner` is held against.

A page is a letter that stands for 128 tokens. Slots come from the planner's answers; everything else is derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from hicache.look import Reason, Rules

PAGE = 128


@dataclass(eq=False)
class Page:
    """One live page. `children` are those that a look can find; what hangs on a bad page is not among them."""

    letter: str
    root: bytes
    parent: Page | None
    slot: int
    owner: int | None  # the plan that stores it; None: ready
    children: dict[str, Page] = field(default_factory=dict)
    stamp: int = 0  # its last use, or that of something behind it that has gone
    pins: int = 0
    doomed: bool = False
    loose: bool = False  # something behind it went out of turn: its place in line is not told
    state: State | None = None

    def prefix(self) -> tuple[bytes, str]:
        """Its root and the letters up to it."""
        before = self.parent.prefix()[1] if self.parent else ""
        return self.root, before + self.letter

    def path(self) -> list[Page]:
        """All pages from the first to this one."""
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(eq=False)
class State:
    """One used state slot."""

    slot: int
    page: Page
    owner: int | None
    pins: int = 0
    stamp: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Plan:
    """What a plan holds."""

    rank: int
    path: list[Page]
    stored: list[Page]
    states: list[State]
    load: int = 0
    load_state: State | None = None
    loading: bool = True
    storing: bool = False
    told: list[bool] = field(default_factory=list)  # one True for each callback that came


class Oracle:
    """All pages, states and plans."""

    def __init__(self, pages: int, states: int, rules: Rules) -> None:
        self.total, self.total_states, self.rules = pages, states, rules
        self.tops: dict[bytes, dict[str, Page]] = {}
        self.pages: set[Page] = set()
        self.states: set[State] = set()
        self.plans: dict[int, Plan] = {}
        self.gone: set[tuple[bytes, str]] = set()  # evicted
        self.clock = count(1)

    # ---- looking ----

    def found(self, root: bytes, letters: str) -> tuple[list[Page], list[Page]]:
        """Ready pages from the start, then those that are being stored."""
        ready: list[Page] = []
        reserved: list[Page] = []
        level = self.tops.get(root, {})
        for letter in letters:
            page = level.get(letter)
            if page is None or (page.owner is None and reserved):
                break
            (ready if page.owner is None else reserved).append(page)
            level = page.children
        return ready, reserved

    def boundary(self, pages: list[Page], tokens: int, *, promised: bool) -> int:
        """Pages that can be reused."""
        for pages_before in range(len(pages), 0, -1):
            if pages_before * PAGE > tokens - self.rules.keep_tokens:
                continue
            state = pages[pages_before - 1].state
            if not self.rules.has_states or (state is not None and (promised or state.owner is None)):
                return pages_before
        return 0

    def look(self, root: bytes, letters: str, tokens: int) -> tuple[int, Reason, int | None, int]:
        """Cached tokens, the reason why not more (OTHER_NAMESPACE left out), who to wait for, and for how many."""
        ready, reserved = self.found(root, letters)
        hit = self.boundary(ready, tokens, promised=False)
        later = self.boundary(ready + reserved, tokens, promised=True) if reserved else hit
        twin = (reserved[0].owner, (later - hit) * PAGE) if later > hit else (None, 0)
        cap = max(0, tokens - self.rules.keep_tokens) // PAGE
        if hit == len(letters):
            reason = Reason.FULL
        elif hit < min(len(ready), cap):
            reason = Reason.NO_STATE
        elif hit == cap:
            reason = Reason.KEEP_TOKENS
        elif reserved:
            reason = Reason.BEING_STORED
        elif (root, letters[: len(ready) + 1]) in self.gone:
            reason = Reason.EVICTED
        else:
            reason = Reason.NEVER_STORED
        return hit * PAGE, reason, *twin

    def boundaries(self, tokens: int, held: list[Page]) -> list[int]:
        """Boundaries whose states a plan stores if there is room, in pages, last first."""
        if not self.rules.has_states:
            return []
        near = [
            pages
            for pages in range(tokens // PAGE, 0, -1)
            if pages * PAGE >= max(self.rules.first_state, tokens - self.rules.state_window)
        ][:4]
        return [pages for pages in near if pages <= len(held) and held[pages - 1].state is None]

    def room(self) -> int:
        """Slots a plan can get."""
        return (
            self.total
            - len(self.pages)
            + sum(page.owner is None and not page.doomed and not page.pins for page in self.pages)
        )

    # ---- changing ----

    def pin(self, path: list[Page]) -> None:
        """Hold a path."""
        for page in path:
            page.pins += 1

    def unpin(self, path: list[Page], *, used: bool = True) -> None:
        """Give a path back; its last page counts as used once nobody holds it."""
        for page in path:
            page.pins -= 1
        if path and used and not path[-1].pins and not path[-1].doomed:
            path[-1].stamp, path[-1].loose = next(self.clock), False
        self.sweep()

    def evict(self, slots: set[int]) -> int:
        """These slots' pages went: each must have been the leaf used least recently when it did.

        Returns how many bad pages were free with them.
        """
        victims = {page for page in self.pages if page.slot in slots}
        left = len(self.pages) - len(victims)
        while victims:
            leaves = self.leaves()
            able = sorted(victims & leaves, key=lambda page: page.stamp)
            assert able, "a page was evicted that is held, or has children that stay"
            victim = able[0]
            if not victim.loose:
                older = [page.prefix() for page in leaves - victims if page.stamp < victim.stamp and not page.loose]
                assert not older, f"{victim.prefix()} went before {older}"
            self.gone.add(victim.prefix())
            self.remove(victim)
            if victim.parent:
                victim.parent.stamp = max(victim.parent.stamp, victim.stamp)
                victim.parent.loose |= victim.loose
            victims.remove(victim)
            self.sweep()
        return left - len(self.pages)

    def leaves(self) -> set[Page]:
        """Pages that may be evicted now."""
        parents = {page.parent for page in self.pages}
        return {
            page
            for page in self.pages
            if page.owner is None and not page.doomed and not page.pins and page not in parents
        }

    def sweep(self) -> None:
        """Bad pages go as soon as nobody holds them and nothing hangs on them."""
        while True:
            parents = {page.parent for page in self.pages}
            done = [
                page
                for page in self.pages
                if page.doomed and not page.pins and page.owner is None and page not in parents
            ]
            if not done:
                return
            for page in done:
                self.remove(page)
                for before in page.path()[:-1]:
                    before.loose = True

    def remove(self, page: Page) -> None:
        """A page is gone, and its state with it."""
        self.pages.remove(page)
        if page.state:
            self.drop_state(page.state)
        self.hide(page)

    def hide(self, page: Page) -> None:
        """No look finds it any more."""
        level = page.parent.children if page.parent else self.tops.get(page.root, {})
        if level.get(page.letter) is page:
            del level[page.letter]

    def store(self, name: int, root: bytes, path: list[Page], letters: str, slots: list[int]) -> list[Page]:
        """Pages reserved by a plan behind a path."""
        pages: list[Page] = []
        parent = path[-1] if path else None
        for letter, slot in zip(letters, slots, strict=True):
            parent = Page(letter, root, parent, slot, name)
            (parent.parent.children if parent.parent else self.tops.setdefault(root, {}))[letter] = parent
            self.pages.add(parent)
            pages.append(parent)
        return pages

    def reserve_state(self, name: int, page: Page, slot: int) -> State:
        """A state slot for a plan; with none free, the state used least recently goes."""
        if len(self.states) == self.total_states:
            oldest = min(
                (state for state in self.states if state.owner is None and not state.pins), key=lambda s: s.stamp
            )
            assert oldest.slot == slot
            self.drop_state(oldest)
        assert slot not in {state.slot for state in self.states}
        page.state = State(slot, page, name)
        self.states.add(page.state)
        return page.state

    def can_reserve_state(self) -> bool:
        """Whether a state slot is free or can be made so."""
        return len(self.states) < self.total_states or any(s.owner is None and not s.pins for s in self.states)

    def drop_state(self, state: State) -> None:
        """Never found again; the slot is used while it is pinned."""
        if state.page.state is state:
            state.page.state = None
        state.dropped = True
        if not state.pins:
            self.states.discard(state)

    def unpin_state(self, state: State) -> None:
        """Its load is done."""
        state.pins -= 1
        if not state.pins:
            state.stamp = next(self.clock)
            if state.dropped:
                self.states.discard(state)

    def doom(self, page: Page) -> None:
        """A page's bytes are wrong."""
        if page.owner is None and not page.doomed:
            page.doomed = True
            self.hide(page)
            for before in page.path()[:-1]:
                before.loose = True
            self.sweep()

    def end_load(self, plan: Plan, bad: int = -1) -> None:
        """A load's answer."""
        plan.loading = False
        if 0 <= bad < plan.load:
            self.doom(plan.path[bad])
        if plan.load_state:
            if bad == plan.load and not plan.load_state.dropped:
                self.drop_state(plan.load_state)
            self.unpin_state(plan.load_state)

    def end_store(self, plan: Plan, pages: int, states: set[int]) -> None:
        """A store's answer: so many pages, and the states of these slots."""
        plan.storing = False
        if any(page.doomed for page in [*plan.path, *plan.stored]):
            pages = 0
        for page in reversed(plan.stored[pages:]):
            self.remove(page)
        for page in plan.stored[:pages]:
            page.owner = None
        if pages:
            plan.stored[pages - 1].stamp = next(self.clock)
        for state in reversed(plan.states):
            if state.page in self.pages and not state.page.doomed and state.slot in states:
                state.owner, state.stamp = None, next(self.clock)
            elif not state.dropped:
                self.drop_state(state)
        self.sweep()

    def close(self, name: int) -> None:
        """A plan ends, answered or not."""
        plan = self.plans.pop(name)
        if plan.loading:
            self.end_load(plan)
        if plan.storing:
            self.end_store(plan, 0, set())
        self.unpin(plan.path)

    def reset(self) -> int:
        """All are forgotten, those in use once they are let go."""
        self.tops.clear()
        idle = [page for page in self.pages if page.owner is None and not page.pins]
        for page in idle:
            self.remove(page)
        for page in self.pages:
            page.doomed = True
            page.children.clear()
        return len(idle)
