"""The block manager against a set of what is taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockManager

TOTAL = 7


class Blocks(RuleBasedStateMachine):
    """Takes and gives back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(TOTAL)
        self.taken: set[int] = set()

    @precondition(lambda self: len(self.taken) < TOTAL)
    @rule()
    def take(self) -> None:
        block = self.manager.take()
        assert block not in self.taken
        assert 0 <= block < TOTAL
        self.taken.add(block)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.manager.give_back(some)
        self.taken -= set(some)

    @precondition(lambda self: len(self.taken) < TOTAL)
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        free = data.draw(st.sampled_from(sorted(set(range(TOTAL)) - self.taken)))
        with pytest.raises(AssertionError, match=f"block {free} was given back twice"):
            self.manager.give_back([free])

    @precondition(lambda self: len(self.taken) == TOTAL)
    @rule()
    def take_from_empty(self) -> None:
        with pytest.raises(AssertionError, match="no free block"):
            self.manager.take()

    @invariant()
    def counts(self) -> None:
        assert self.manager.used == len(self.taken)
        assert self.manager.free == TOTAL - len(self.taken)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def test_released_blocks_are_reused_first() -> None:
    manager = BlockManager(1000)
    first = [manager.take() for _ in range(3)]
    manager.give_back(first)
    assert {manager.take() for _ in range(3)} == set(first)
