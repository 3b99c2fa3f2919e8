"""The prefix cache as an engine sees it: what a new sequence may reuse, and what is kept of a computed one.

Promises: one CacheLoaded and at most one CacheStored per plan, whatever becomes of its request; a page is made known
only after finite logits; blocks that wait for their copy are held. Works for any engine: it knows block tables,
token ids and plans, and nothing about models, sampling or scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from engine.blocks import BlockManager
from engine.budget import Budget
from engine.copies import Load, Loads, Store, Stores
from engine.prefix import Int32, Prefix, split, stores_anything
from engine.staging import Staging
from hicache.keys import PAGE_TOKENS
from hicache.transfer import Transfer
from ipc.messages import CacheOffer, CachePlan, CacheStore, CacheStored, Event

# Nothing wakes an engine whose copies end on the device: it looks again after this long.
TICKET_PAUSE_S: Final = 0.0002

StateRow = Callable[[int], int]
"""Of one sequence: pages before a state -> the device row it has there."""


class _Copying(NamedTuple):
    transfer: Transfer
    loads: Loads
    stores: Stores
    budget: Budget

    @property
    def busy(self) -> bool:
        return bool(self.loads) or self.waits_for_device

    @property
    def waits_for_device(self) -> bool:
        return bool(self.stores) or bool(self.loads.unsettled)


class Offload:
    """Carries out the plans of one engine's requests. `staging`: a prefix is its pages and the state behind them."""

    def __init__(self, blocks: BlockManager, *, keep_tokens: int = 1, staging: Staging | None = None) -> None:
        self._blocks = blocks
        self._keep_tokens = keep_tokens
        self._staging = staging
        self._has_states = staging is not None
        self._copying: _Copying | None = None  # None: no plan can come
        self._epoch = 0
        self._events: list[Event] = []

    def attach(self, transfer: Transfer, page_bytes: int) -> None:
        """Plans may come from now on."""
        pages_per_second = transfer.bytes_per_second / page_bytes
        self._copying = _Copying(transfer, Loads(transfer), Stores(transfer, self._blocks), Budget(pages_per_second))

    def detach(self) -> None:
        """Let go of the pool; what was to be copied is not, and what is owed stays unanswered."""
        if self._copying is not None:
            self._copying.transfer.close()
            self._copying = None

    def open(self, plan: CachePlan | None, prompt: Int32) -> Prefix | None:
        """A request came. Raises ValueError for a plan that cannot be carried out; nothing is owed then."""
        if plan is None:
            return None
        if self._copying is None:
            raise ValueError(f"plan {plan.plan} came without a host pool")
        if self._has_states and plan.load and plan.load_state < 0:
            raise ValueError(f"plan {plan.plan} loads pages without the state behind them")
        return Prefix(plan, prompt, self._keep_tokens, self._epoch)

    def find(self, prefix: Prefix | None, tokens: Int32) -> list[int]:
        """Blocks that a sequence of these tokens may share; look again if anything happens in between."""
        if prefix is None or not prefix.plan.reuse:
            return []
        prefix.extend(tokens)
        pages = max(0, len(tokens) - self._keep_tokens) // PAGE_TOKENS
        if self._has_states:
            # The plan's boundary is the only one whose state can be had, and only once.
            pages = 0 if prefix.started else len(prefix.slots)
        return self._blocks.find(prefix.plan.root, prefix.keys[:pages], tokens)

    def begin(self, prefix: Prefix | None, shared: int, table: Int32, state_row: StateRow | None = None) -> None:
        """Admitted: the first `shared` blocks of `table` are shared, the others its own. Loading begins if need be.

        While `prefix.loading` nothing may be computed; after that, from token `prefix.pages * PAGE_TOKENS` on. Where
        that is less than what is shared, the load failed, and the sequence has to begin again in blocks of its own.
        """
        if prefix is None:
            return
        prefix.shared = prefix.pages = shared
        if prefix.started:
            return
        prefix.started = True
        if prefix.plan.reuse and prefix.wants_load(self._has_states):
            assert self._copying is not None
            prefix.loading = True
            row = state_row(len(prefix.slots)) if state_row is not None else -1
            self._copying.loads.add(Load(prefix, table, row))
            self._load(self._copying)
        else:
            self._events.append(prefix.loaded())

    def computed(self, prefix: Prefix | None, blocks: list[int], state_row: StateRow | None = None) -> None:
        """The whole prompt is, with finite logits. Later calls do nothing."""
        if prefix is None or prefix.computed:
            return
        prefix.computed = True
        self._know(prefix, prefix.prompt, blocks)
        plan = prefix.plan
        if stores_anything(plan):
            assert self._copying is not None
            slots = np.frombuffer(plan.store, "<u4")
            stored = blocks[plan.store_from : plan.store_from + len(slots)]
            # States before the one it began with have never been on the device.
            states = [state for state in plan.store_states if state[0] >= prefix.pages] if state_row is not None else []
            rows = np.array([state_row(pages) for pages, _ in states] if state_row is not None else [], np.int32)
            state_slots = np.array([slot for _, slot in states], np.uint32)
            self._copying.stores.add(Store(plan.plan, stored, slots, state_slots, rows))

    def pause(self, prefix: Prefix | None, tokens: Int32, blocks: list[int]) -> None:
        """Preempted with these tokens computed, its blocks still held: what is good of them stays to be found."""
        if prefix is None:
            return
        self._stop_loading(prefix)
        if prefix.computed:
            self._know(prefix, tokens, blocks)

    def end(self, prefix: Prefix | None, tokens: Int32, blocks: list[int], state_row: StateRow | None = None) -> None:
        """Came to its end with these tokens computed, its blocks still held: they stay to be found, new ones are
        offered, with the states that are still there."""
        if prefix is None:
            return
        self._know(prefix, tokens, blocks)
        first, pages = prefix.prompt_pages, len(tokens) // PAGE_TOKENS
        if pages > first and prefix.epoch == self._epoch:
            parent = prefix.keys[first - 1] if first else prefix.plan.root
            ids = tokens[first * PAGE_TOKENS : pages * PAGE_TOKENS].astype("<i4")
            states = self._stage(first, len(tokens), state_row)
            self._events.append(CacheOffer(parent, b"".join(prefix.keys[first:pages]), ids.tobytes(), states))

    def close(self, prefix: Prefix | None) -> None:
        """The request is gone, for whatever reason, its blocks still held: what its plan is owed is answered."""
        if prefix is None:
            return
        self._stop_loading(prefix)
        if not prefix.started:
            self._events.append(prefix.loaded())
        if not prefix.computed and stores_anything(prefix.plan):
            self._events.append(CacheStored(prefix.plan.plan))

    def store(self, command: CacheStore) -> None:
        """See `Engine.store`."""
        blocks = self._blocks.follow(split(command.keys))
        states = [(row, slot) for name, slot in command.states if (row := self._staged(name)) >= 0]
        if self._copying is None or not (blocks or states):
            self._events.append(CacheStored(command.plan))
            return
        slots = np.frombuffer(command.store, "<u4")[: len(blocks)]
        rows = np.array([row for row, _ in states], np.int32)
        state_slots = np.array([slot for _, slot in states], np.uint32)
        self._copying.stores.add(Store(command.plan, blocks, slots, state_slots, rows))

    def forget(self) -> None:
        """See `Engine.forget`. Pages of requests that came before are not made known later either."""
        self._epoch += 1
        self._blocks.forget()

    @property
    def busy(self) -> bool:
        """Whether copies are under way or events wait."""
        return bool(self._events) or (self._copying is not None and self._copying.busy)

    def pump(self, *, decoding: bool) -> None:
        """A step begins: carry on with copies, within this step's budget."""
        if self._copying is None:
            return
        self._copying.budget.renew(decoding=decoding)
        if self._copying.busy:
            self._load(self._copying)
            # At least one page: loads must not hold up stores, which hold blocks that others wait for.
            self._store(self._copying, max(1, self._copying.budget.left))

    def relieve(self) -> bool:
        """Blocks are short: end the oldest store now. False: there is none."""
        if self._copying is None or not self._copying.stores:
            return False
        before = len(self._copying.stores)
        self._store(self._copying, self._copying.stores.next_pages)
        while len(self._copying.stores) == before:
            time.sleep(TICKET_PAUSE_S)
            self._store(self._copying, 0)
        return True

    def rest(self) -> None:
        """Nothing is to be computed now: don't spin where only the device is at work."""
        if self._copying is not None and self._copying.waits_for_device and not self._copying.loads:
            time.sleep(TICKET_PAUSE_S)

    def take_events(self) -> list[Event]:
        """What is to be told, oldest first; each event once."""
        if self._copying is not None:
            self._events += self._copying.loads.settled()
        events, self._events = self._events, []
        return events

    def _load(self, copying: _Copying) -> None:
        start = copying.budget.now()
        copied, ended = copying.loads.advance(copying.budget.left)
        copying.budget.spend(copied, start)
        for load in ended:
            self._loaded(copying, load)

    def _loaded(self, copying: _Copying, load: Load) -> None:
        prefix = load.prefix
        prefix.loading = False
        # Known at once: should it be preempted before its prompt is computed, the pages are still here.
        self._know(prefix, prefix.prompt[: prefix.pages * PAGE_TOKENS], load.table[: prefix.pages].tolist())
        copying.loads.answer(prefix.loaded())

    def _stop_loading(self, prefix: Prefix) -> None:
        if self._copying is None or not prefix.loading:
            return
        if self._has_states:
            prefix.pages = 0
        self._loaded(self._copying, self._copying.loads.drop(prefix))

    def _store(self, copying: _Copying, pages: int) -> None:
        start = copying.budget.now()
        begun, ended = copying.stores.advance(pages)
        copying.budget.spend(begun, start)
        self._events += ended

    def _stage(self, prompt_pages: int, tokens: int, state_row: StateRow | None) -> tuple[tuple[int, int], ...]:
        """Keep what states an answer has left: (pages of the answer before it, its name)."""
        if self._staging is None or state_row is None:
            return ()
        boundaries = self._staging.boundaries(prompt_pages, tokens)
        return tuple((pages - prompt_pages, self._staging.put(state_row(pages))) for pages in boundaries)

    def _staged(self, name: int) -> int:
        return -1 if self._staging is None else self._staging.find(name)

    def _know(self, prefix: Prefix, tokens: Int32, blocks: list[int]) -> None:
        """The whole pages of these tokens are in the first of these blocks."""
        pages = len(tokens) // PAGE_TOKENS
        if pages and prefix.epoch == self._epoch:
            prefix.extend(tokens)
            self._blocks.know(prefix.plan.root, prefix.keys[:pages], blocks[:pages], tokens)
