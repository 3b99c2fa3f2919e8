"""Which sequences take part in the next step, and with how many tokens: continuous batching with chunked prompts.

Promises: decodes come first and oldest first; prompts are served in order of arrival; when blocks run out the
latest arrival gives its own back and is computed again later, so the oldest sequence always advances and every
sequence ends. What a sequence may reuse is shared or loaded when it is admitted; while it loads it takes no part.
Knows nothing about tensors, sampling or why a sequence ends.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.blocks import BlockManager
from engine.native.sequence import BLOCK_SIZE, Sequence, blocks_for
from engine.offload import Offload


class Span(NamedTuple):
    """`tokens` tokens of `sequence` from `sequence.computed` on, in one step."""

    sequence: Sequence
    tokens: int


class Scheduler:
    """Owns the waiting queue, the running list and every block that a sequence holds.

    Both lists are sorted by arrival and every running sequence is older than every waiting one; that is why
    "last of running" is the latest arrival and why putting a victim in front of the queue keeps the order.
    """

    def __init__(
        self,
        blocks: BlockManager,
        offload: Offload,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`max_prompt_tokens` are those of a step beside its decodes; None: what else fits into the step."""
        assert max_num_seqs > 0
        assert max_num_batched_tokens > 0
        self._blocks = blocks
        self._offload = offload
        # A step has room for each running sequence's decode, or the youngest would wait without a bound.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._max_tokens = max_num_batched_tokens
        self._max_prompt_tokens = max_prompt_tokens or max_num_batched_tokens
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self.preemptions = 0

    @property
    def running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that hold nothing yet, or no longer."""
        return len(self._waiting)

    @property
    def decoding(self) -> bool:
        """Whether a running sequence waits for its next token."""
        return any(sequence.remaining == 1 for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose `limit` fits the pool."""
        assert blocks_for(sequence.limit - 1) <= self._blocks.total
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase and free its blocks."""
        if sequence.num_blocks:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def plan(self) -> list[Span]:
        """The spans of the next step, decodes first; empty only while what is here waits for copies."""
        self._start_loaded()
        before = self.preemptions
        spans = self._plan_decodes()
        budget = min(self._max_tokens - len(spans), self._max_prompt_tokens)
        for sequence in self._running:
            budget = self._plan_prompt(sequence, budget, spans)
        # Blocks that a preemption has just freed are for the sequences that lacked them.
        if self.preemptions == before:
            self._admit(budget, spans)
        return spans

    def _start_loaded(self) -> None:
        for sequence in self._running:
            if not sequence.computed and sequence.prefix is not None and not sequence.loading:
                sequence.computed = sequence.prefix.pages * BLOCK_SIZE

    def _plan_decodes(self) -> list[Span]:
        # The list shrinks from its end while this runs: a victim holds no block any more.
        return [
            Span(sequence, 1)
            for sequence in tuple(self._running)
            if sequence.remaining == 1 and not sequence.loading and sequence.num_blocks and self._make_room(sequence)
        ]

    def _plan_prompt(self, sequence: Sequence, budget: int, spans: list[Span]) -> int:
        count = min(sequence.remaining, budget)
        if sequence.remaining == 1 or count == 0 or sequence.loading:
            return budget
        spans.append(Span(sequence, count))
        return budget - count

    def _admit(self, budget: int, spans: list[Span]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            need = blocks_for(sequence.length)
            shared = self._offload.find(sequence.prefix, sequence.known())
            fresh = need - len(shared) + self._blocks.idle(shared)
            # One spare block for each running sequence: without it a new prompt takes the blocks that the
            # decodes need a few steps later, and is thrown out again with its work lost.
            if fresh + len(self._running) > self._blocks.free and (self._running or fresh > self._blocks.free):
                if sequence.prefix is not None:
                    sequence.prefix.deferred = True
                return
            self._waiting.popleft()
            self._running.append(sequence)
            self._occupy(sequence, shared, need)
            count = 0 if sequence.loading else min(sequence.remaining, budget)
            if count:
                spans.append(Span(sequence, count))
                budget -= count

    def _occupy(self, sequence: Sequence, shared: list[int], need: int) -> None:
        """Blocks for all known tokens, the first ones shared, and what may be reused of them."""
        self._blocks.share(shared)
        sequence.table[: len(shared)] = shared
        sequence.num_blocks = len(shared)
        self._grow(sequence, need)
        self._offload.begin(sequence.prefix, len(shared), sequence.table)
        self._start_loaded()

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens, taken from later arrivals if need be. False: it was the latest itself."""
        need = blocks_for(sequence.length)
        while need - sequence.num_blocks > self._blocks.free:
            if self._offload.relieve():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._grow(sequence, need)
        return True

    def _grow(self, sequence: Sequence, need: int) -> None:
        while sequence.num_blocks < need:
            sequence.table[sequence.num_blocks] = self._blocks.take()
            sequence.num_blocks += 1

    def _preempt(self, victim: Sequence) -> None:
        self._running.pop()
        self._offload.pause(victim.prefix, victim.tokens[: victim.computed], victim.blocks())
        self._release(victim)
        victim.computed = 0
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence.blocks())
        sequence.num_blocks = 0
