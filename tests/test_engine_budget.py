"""How much may be copied in a step, on a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import COPY_SHARE, UNDISTURBED_S, Budget


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(budget: Budget, clock: Clock, count: int, seconds: float) -> None:
    for _ in range(count):
        clock.now += seconds
        budget.renew(decoding=True)


def test_beside_decodes_copies_get_their_share_of_a_usual_step() -> None:
    clock = Clock()
    budget = Budget(100_000, clock)
    steps(budget, clock, 100, 0.010)
    assert budget.left == pytest.approx(COPY_SHARE * 0.010 * 100_000, abs=1)
    budget.renew(decoding=False)
    assert budget.left == int(UNDISTURBED_S * 100_000)


def test_neither_a_lone_prompt_nor_a_pause_makes_the_next_decode_wait() -> None:
    clock = Clock()
    budget = Budget(100_000, clock)
    steps(budget, clock, 100, 0.010)
    usual = budget.left
    steps(budget, clock, 1, 60.0)
    assert budget.left < 10 * usual
    steps(budget, clock, 1, 0.010)
    assert budget.left == pytest.approx(usual, abs=1)


def test_time_spent_on_copies_does_not_lengthen_the_step() -> None:
    clock = Clock()
    budget = Budget(100_000, clock)
    for _ in range(100):
        steps(budget, clock, 1, 0.010)
        start = budget.now()
        clock.now += 0.005
        budget.spend(500, start)
    steps(budget, clock, 1, 0.010)
    assert budget.left == pytest.approx(100, abs=1)


def test_copies_that_turn_out_slower_are_followed_and_faster_ones_are_not_believed() -> None:
    clock = Clock()
    budget = Budget(1000, clock)
    for pages_per_second, expected in ((100, 5), (10**9, 50)):
        for _ in range(100):
            start = budget.now()
            clock.now += 10 / pages_per_second
            budget.spend(10, start)
        budget.renew(decoding=False)
        assert budget.left == pytest.approx(expected, abs=1)


@given(st.floats(1e-3, 1e9), st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.integers(0, 10**6)), max_size=20))
def test_a_step_may_always_copy_something_and_spends_no_more_than_it_has(
    speed: float, steps: list[tuple[float, bool, int]]
) -> None:
    clock = Clock()
    budget = Budget(speed, clock)
    for seconds, decoding, pages in steps:
        clock.now += seconds
        budget.renew(decoding=decoding)
        assert 1 <= budget.left <= max(1, UNDISTURBED_S * speed)
        budget.spend(pages, budget.now())
        assert budget.left >= 0
