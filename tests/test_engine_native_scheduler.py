"""The scheduler driven by a model that only counts: whatever arrives and leaves, all end and nothing is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockManager
from engine.native.scheduler import Scheduler, Span
from engine.native.sequence import BLOCK_SIZE, Sequence, blocks_for
from engine.offload import Offload
from ipc.messages import Sampling


@dataclass(frozen=True)
class Arrival:
    """A request of the plan of a test."""

    step: int
    prompt: int
    output: int
    cancelled_after: int | None  # steps after its arrival


def sequence(arrival: int, prompt: int, output: int) -> Sequence:
    limit = prompt + output
    return Sequence(
        slot=arrival,
        generation=1,
        arrival=arrival,
        prompt_length=prompt,
        limit=limit,
        min_tokens=0,
        ignore_eos=True,
        sampling=Sampling(seed=0),
        tokens=np.zeros(limit, dtype=np.int32),
        table=np.zeros(blocks_for(limit), dtype=np.int32),
    )


def scheduler_of(blocks: BlockManager, max_num_seqs: int, budget: int, prompt_tokens: int | None = None) -> Scheduler:
    return Scheduler(blocks, Offload(blocks), max_num_seqs, budget, prompt_tokens)


def advance(scheduler: Scheduler, spans: list[Span]) -> list[Sequence]:
    """Compute the spans, sample where a sequence is computed to its end; returns those that are complete."""
    complete = []
    for one, count in spans:
        assert 1 <= count <= one.remaining
        assert one.num_blocks >= blocks_for(one.computed + count)
        one.computed += count
        if one.remaining == 0:
            one.append(0)
            if one.length == one.limit:
                complete.append(one)
                scheduler.remove(one)
    return complete


POOL = 6

arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 40),
        prompt=st.integers(1, 4 * BLOCK_SIZE),
        output=st.integers(1, 2 * BLOCK_SIZE),
        cancelled_after=st.none() | st.integers(0, 60),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(1, 6), st.integers(1, 400))
def test_every_request_ends_and_every_block_returns(plan: list[Arrival], max_num_seqs: int, budget: int) -> None:
    blocks = BlockManager(POOL)
    scheduler = scheduler_of(blocks, max_num_seqs, budget)
    here: list[Sequence] = []
    leaving: dict[int, list[Sequence]] = {}
    # The oldest advances in every step and is never thrown out: at worst they run one after the other.
    bound = 41 + sum(one.output + 2 + one.prompt // budget for one in plan)
    for step in range(bound):
        for number, one in enumerate(plan):
            if one.step == step:
                here.append(sequence(step * len(plan) + number, one.prompt, one.output))
                scheduler.add(here[-1])
                if one.cancelled_after is not None:
                    leaving.setdefault(step + one.cancelled_after, []).append(here[-1])
        for gone in leaving.pop(step, []):
            if gone in here:
                here.remove(gone)
                scheduler.remove(gone)
        spans = scheduler.plan()
        check_spans(spans, here, budget, max_num_seqs)
        for complete in advance(scheduler, spans):
            here.remove(complete)
        assert blocks.used == sum(one.num_blocks for one in here)
    assert not here
    assert blocks.used == scheduler.running == scheduler.waiting == 0


def check_spans(spans: list[Span], here: list[Sequence], budget: int, max_num_seqs: int) -> None:
    taking_part = [span.sequence for span in spans]
    assert bool(spans) == bool(here)
    assert sum(span.tokens for span in spans) <= budget
    assert len(spans) <= max_num_seqs
    assert len(set(map(id, taking_part))) == len(spans)
    if here:
        assert min(here, key=lambda one: one.arrival) in taking_part


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = scheduler_of(BlockManager(20), 4, 100)
    short, long = sequence(0, 10, 50), sequence(1, 1000, 5)
    scheduler.add(short)
    advance(scheduler, scheduler.plan())
    scheduler.add(long)
    for _ in range(10):
        spans = scheduler.plan()
        assert [(span.sequence, span.tokens) for span in spans] == [(short, 1), (long, 99)]
        advance(scheduler, spans)
    assert scheduler.plan() == [Span(short, 1), Span(long, 10)]


def test_prompts_of_a_step_are_bounded_and_its_decodes_are_not() -> None:
    scheduler = scheduler_of(BlockManager(40), 8, 1000, prompt_tokens=64)
    talking = [sequence(number, 10, 50) for number in range(3)]
    for one in talking:
        scheduler.add(one)
    assert advance(scheduler, scheduler.plan()) == []
    long, short = sequence(3, 100, 5), sequence(4, 40, 5)
    scheduler.add(long)
    scheduler.add(short)
    decodes = [Span(one, 1) for one in talking]
    assert scheduler.plan() == [*decodes, Span(long, 64)]
    advance(scheduler, [Span(long, 64)])
    assert scheduler.plan() == [*decodes, Span(long, 36), Span(short, 28)]


def test_prompts_are_served_in_order_of_arrival() -> None:
    scheduler = scheduler_of(BlockManager(20), 4, 100)
    prompts = [sequence(number, 60, 5) for number in range(3)]
    for one in prompts:
        scheduler.add(one)
    assert scheduler.plan() == [Span(prompts[0], 60), Span(prompts[1], 40)]


def test_the_latest_arrival_gives_way_and_comes_back_first() -> None:
    """Both outgrow their block with none left: the younger is thrown out, keeps its tokens, and restarts from them."""
    scheduler = scheduler_of(BlockManager(3), 4, 1000)
    old, young, later = sequence(0, 127, 100), sequence(1, 127, 100), sequence(2, 10, 5)
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler, scheduler.plan())  # both computed, one block each, one block free
    advance(scheduler, scheduler.plan())  # both at 128 tokens computed
    scheduler.add(later)
    spans = scheduler.plan()
    assert [span.sequence for span in spans] == [old]
    assert (young.num_blocks, young.computed, young.length) == (0, 0, 129)
    assert (scheduler.preemptions, scheduler.waiting) == (1, 2)
    while scheduler.running and spans[-1].sequence is not young:
        advance(scheduler, spans)
        spans = scheduler.plan()
    assert spans[-1] == Span(young, 129)
    assert later.num_blocks == 0
