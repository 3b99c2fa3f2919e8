"""The scheduler with plans of the host cache, driven by a model that only counts: whatever hits, loads, stores,
is preempted or leaves, every request ends, every plan is answered once, and nothing is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native.scheduler import Scheduler, Span
from engine.native.sequence import BLOCK_SIZE, Sequence, blocks_for
from ipc.messages import CacheLoaded, CacheStored, Sampling
from tests.offload_device import Device, plan_of, prompt

POOL = 6


@dataclass(frozen=True)
class Arrival:
    """A request of the plan of a test."""

    step: int
    length: int
    content: int  # prompts of the same content begin alike
    output: int
    load: int  # pages, as far as the prompt has them
    store: int
    reuse: bool
    cancelled_after: int | None  # steps after its arrival


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        length=st.integers(1, 4 * BLOCK_SIZE),
        content=st.integers(0, 1),
        output=st.integers(1, 2 * BLOCK_SIZE),
        load=st.integers(0, 4),
        store=st.integers(0, 2),
        reuse=st.booleans(),
        cancelled_after=st.none() | st.integers(0, 60),
    ),
    max_size=10,
)


class Rank:
    """Scheduler and offload over one device, and the sequences on it."""

    def __init__(self, device: Device, max_num_seqs: int, budget: int) -> None:
        self.device, self.offload = device, device.offload
        self.scheduler = Scheduler(device.blocks, device.offload, max_num_seqs, budget)
        self.here: list[Sequence] = []
        self.loaded: list[int] = []
        self.stored: list[int] = []

    def add(self, number: int, one: Arrival) -> Sequence:
        tokens = prompt(0, one.length, seed=one.content)
        load = min(one.load, (one.length - 1) // BLOCK_SIZE) if one.reuse else 0
        first = min(load, one.length // BLOCK_SIZE)
        store = min(one.store, one.length // BLOCK_SIZE - first)
        plan = plan_of(
            tokens, number, load=list(range(load)), store_from=first, store=list(range(8, 8 + store)), reuse=one.reuse
        )
        sequence = Sequence(
            slot=number, generation=1, arrival=number, prompt_length=one.length, limit=one.length + one.output,
            min_tokens=0, ignore_eos=True, sampling=Sampling(seed=0),
            tokens=np.concatenate([tokens, np.zeros(one.output, np.int32)]),
            table=np.zeros(blocks_for(one.length + one.output), dtype=np.int32),
            prefix=self.offload.open(plan, tokens),
        )  # fmt: skip
        self.here.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.here.remove(sequence)
        self.offload.close(sequence.prefix)
        self.scheduler.remove(sequence)

    def step(self) -> list[Span]:
        self.offload.pump(decoding=self.scheduler.decoding)
        spans = self.scheduler.plan()
        for one, count in spans:
            assert 1 <= count <= one.remaining
            assert one.num_blocks >= blocks_for(one.computed + count)
            one.computed += count
            if one.remaining == 0:
                self.offload.computed(one.prefix, one.blocks())
                one.append(0)
                if one.length == one.limit:
                    self.offload.end(one.prefix, one.tokens[: one.computed], one.blocks())
                    self.leave(one)
        answers = self.device.answers()
        self.loaded += [event.plan for event in answers if isinstance(event, CacheLoaded)]
        self.stored += [event.plan for event in answers if isinstance(event, CacheStored)]
        return spans


@settings(max_examples=40, deadline=None)
@given(arrivals, st.integers(1, 6), st.integers(1, 400))
def test_every_request_ends_and_every_plan_is_answered(plan: list[Arrival], max_num_seqs: int, budget: int) -> None:
    device = Device(POOL)
    rank = Rank(device, max_num_seqs, budget)
    leaving: dict[int, list[Sequence]] = {}
    stores = 0
    # As without a cache, and one page a step for what is copied.
    bound = 41 + sum(one.output + 2 + one.length // budget + one.load + one.store for one in plan)
    for step in range(bound):
        for number, one in enumerate(sorted(plan, key=lambda one: one.step)):
            if one.step == step:
                sequence = rank.add(number, one)
                assert sequence.prefix is not None
                stores += bool(sequence.prefix.plan.store)
                if one.cancelled_after is not None:
                    leaving.setdefault(step + one.cancelled_after, []).append(sequence)
        for gone in leaving.pop(step, []):
            if gone in rank.here:
                rank.leave(gone)
        oldest = min(rank.here, key=lambda one: one.arrival, default=None)
        copying = rank.offload.busy
        spans = rank.step()
        if oldest is not None and not copying:
            assert oldest.loading or oldest in [span.sequence for span in spans]
        assert sum(span.tokens for span in spans) <= budget
    assert not rank.here
    assert not rank.offload.busy
    assert device.blocks.used == rank.scheduler.running == rank.scheduler.waiting == 0
    assert sorted(rank.loaded) == list(range(len(plan)))
    assert len(rank.stored) == len(set(rank.stored)) == stores
    device.close()


def test_one_that_loads_takes_no_part_and_then_begins_behind_what_it_loaded() -> None:
    device = Device(12)
    rank = Rank(device, 4, 1000)
    rank.add(0, Arrival(0, 100, 0, 50, 0, 0, True, None))
    rank.step()
    late = rank.add(1, Arrival(0, 4 * BLOCK_SIZE, 1, 50, 3, 0, True, None))
    assert [span.sequence.slot for span in rank.step()] == [0]  # one page beside a decode
    assert (late.loading, late.num_blocks) == (True, 4)
    assert [span.sequence.slot for span in rank.step()] == [0]
    assert rank.step()[1] == Span(late, BLOCK_SIZE)
    for sequence in tuple(rank.here):
        rank.leave(sequence)
    device.close()


def test_shared_blocks_without_a_holder_are_not_counted_twice() -> None:
    """Five of six blocks are idle pages of the prompt itself: it needs one more, and there is one."""
    device = Device(POOL)
    rank = Rank(device, 4, 1000)
    rank.add(0, Arrival(0, 5 * BLOCK_SIZE, 0, 1, 0, 0, True, None))
    rank.step()
    assert device.blocks.cached == 5
    holder = rank.add(1, Arrival(0, 10, 1, 50, 0, 0, True, None))
    rank.step()
    waiting = rank.add(2, Arrival(0, 5 * BLOCK_SIZE + 1, 0, 1, 0, 0, True, None))
    rank.step()
    assert waiting.num_blocks == 0
    rank.leave(holder)
    assert rank.step() == [Span(waiting, 1)]
    assert not rank.here
    device.close()


def test_blocks_that_wait_for_their_copy_are_had_before_anybody_is_preempted() -> None:
    """The older one needs a second block while the pages of one that ended still hold all of them."""
    device = Device(POOL)
    rank = Rank(device, 4, 1000)
    older = rank.add(0, Arrival(0, 2 * BLOCK_SIZE - 1, 0, 50, 0, 0, True, None))
    rank.step()
    rank.add(1, Arrival(0, 3 * BLOCK_SIZE, 1, 1, 0, 3, True, None))
    rank.step()
    assert (rank.scheduler.running, device.blocks.used) == (1, 2 + 3)
    last_free = device.blocks.take()
    rank.step()
    assert (rank.scheduler.preemptions, older.num_blocks) == (0, 3)
    rank.leave(older)
    device.blocks.give_back([last_free])
    device.close()
