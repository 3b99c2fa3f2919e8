"""The ring of device rows that keeps states of ended requests: what is newest stays, what is overwritten is gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.staging import STATES_PER_ANSWER, Staging
from hicache.keys import PAGE_TOKENS

FIRST_ROW = 5
OLDEST = 3  # rows


def staging(device: dict[int, str], *, first_state: int = 256, window: int = 652) -> Staging:
    def copy(at: int, to: int) -> None:
        device[to] = device[at]

    return Staging(FIRST_ROW, OLDEST, copy, first_state=first_state, window=window)


@given(st.lists(st.text(max_size=3), max_size=12))
def test_the_newest_states_are_found_as_they_were_put(contents: list[str]) -> None:
    device: dict[int, str] = {}
    ring, names = staging(device), []
    for content in contents:
        device[0] = content
        names.append(ring.put(0))
    assert len(set(names)) == len(names)
    device[0] = "changed since"
    found = [ring.find(name) for name in names]
    assert [device[row] for row in found[-OLDEST:]] == contents[-OLDEST:]
    assert all(FIRST_ROW <= row < FIRST_ROW + OLDEST for row in found[-OLDEST:])
    assert found[:-OLDEST] == [-1] * len(contents[:-OLDEST])


def test_a_name_that_was_never_given_is_not_found() -> None:
    device = {0: "state"}
    ring = staging(device)
    assert [ring.find(name) for name in (-1, 0, 1)] == [-1, -1, -1]
    ring.put(0)
    assert [ring.find(name) >= 0 for name in (-1, 0, 1)] == [False, True, False]


@pytest.mark.parametrize(
    ("prompt_pages", "tokens", "expected"),
    [
        (3, 3 * PAGE_TOKENS + 127, []),  # no page more than the prompt's
        (3, 4 * PAGE_TOKENS, [4]),
        (3, 9 * PAGE_TOKENS + 5, [9, 8]),
        (0, 2 * PAGE_TOKENS, [2]),  # none below the first
        (0, PAGE_TOKENS + 9, []),
    ],
)
def test_the_last_boundaries_of_an_answer_are_kept(prompt_pages: int, tokens: int, expected: list[int]) -> None:
    assert staging({}).boundaries(prompt_pages, tokens) == expected
    assert len(expected) <= STATES_PER_ANSWER


def test_a_boundary_that_has_left_the_window_is_not_kept() -> None:
    assert staging({}, window=PAGE_TOKENS).boundaries(0, 9 * PAGE_TOKENS) == [9, 8]
    assert staging({}, window=PAGE_TOKENS).boundaries(0, 9 * PAGE_TOKENS + 1) == [9]
    assert staging({}, window=0).boundaries(0, 9 * PAGE_TOKENS + 1) == []
