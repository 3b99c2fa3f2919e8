"""The planner against a slow oracle: random prompts, answers, losses, bad pages; all invariants after each step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.planner_machine import PlannerMachine


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        PlannerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_planner_does_what_the_oracle_does() -> None:
    run(examples=250, steps=30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_planner_does_what_the_oracle_does_for_a_hundred_thousand_steps() -> None:
    run(examples=1000, steps=100)
