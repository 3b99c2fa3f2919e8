"""The fair line: nothing lost, order kept within a key, and no key ahead of another by more than one item."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.fair import MAX_IDLE_TAGS, FairLine

keys = st.sampled_from("abc")
costs = st.integers(1, 50)


class Item:
    """Compared by identity, as requests are."""


class FairMachine(RuleBasedStateMachine):
    """Against a model that keeps every key's items in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.line: FairLine[Item] = FairLine()
        self.model: dict[str, list[tuple[int, Item]]] = {}

    @rule(key=keys, cost=costs)
    def push(self, key: str, cost: int) -> None:
        item = Item()
        self.line.push(key, cost, item)
        self.model.setdefault(key, []).append((cost, item))

    @precondition(lambda self: len(self.line) > 0)
    @rule()
    def pop(self) -> None:
        seen = self.line.next()
        item = self.line.pop()
        assert seen is not None
        assert seen[1] is item
        (key,) = [key for key, items in self.model.items() if items and items[0][1] is item]
        self.model[key].pop(0)

    @precondition(lambda self: len(self.line) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, items in self.model.items() if items)))
        index = data.draw(st.integers(0, len(self.model[key]) - 1))
        _, item = self.model[key].pop(index)
        assert self.line.remove(key, item)
        assert not self.line.remove(key, item)

    @invariant()
    def sums_agree(self) -> None:
        everything = [entry for items in self.model.values() for entry in items]
        assert len(self.line) == len(everything) == len(list(self.line))
        assert self.line.cost == sum(cost for cost, _ in everything)
        for key, items in self.model.items():
            assert self.line.cost_of(key) == sum(cost for cost, _ in items)


TestFairMachine = FairMachine.TestCase


@given(st.lists(costs, min_size=20, max_size=60), st.lists(costs, min_size=20, max_size=60))
def test_backlogged_keys_are_served_alike(first: list[int], second: list[int]) -> None:
    line: FairLine[tuple[str, int]] = FairLine()
    for key, wanted in (("flood", first), ("other", second)):
        for cost in wanted:
            line.push(key, cost, (key, cost))
    served = {"flood": 0, "other": 0}
    while line.cost_of("flood") and line.cost_of("other"):
        key, cost = line.pop()
        served[key] += cost
        assert abs(served["flood"] - served["other"]) <= 50


def test_a_key_that_comes_late_is_next_but_has_saved_nothing() -> None:
    line: FairLine[str] = FairLine()
    for _ in range(10):
        line.push("flood", 100, "flood")
    for _ in range(5):
        line.pop()
    for _ in range(3):
        line.push("late", 100, "late")
    assert [line.pop() for _ in range(6)].count("late") == 3
    assert line.pop() == "flood"


def test_idle_keys_are_forgotten() -> None:
    line: FairLine[int] = FairLine()
    line.push("busy", 1, 0)
    for number in range(1, 3 * MAX_IDLE_TAGS):
        line.push(f"key{number}", 1, number)
        line.push("busy", 1, 0)
        line.pop()
        line.pop()
    assert len(line._tags) <= MAX_IDLE_TAGS + len(line)
    while line:
        line.pop()
    assert not line._tags


def test_pop_from_an_empty_line() -> None:
    assert FairLine[int]().next() is None
    with pytest.raises(IndexError):
        FairLine[int]().pop()
