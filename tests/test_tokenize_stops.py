"""Stop strings: however the text is cut, the shown pieces are what stands before the first complete stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tokenizer.stops import StopFinder, before_stop

# Few letters, so that stop strings, their beginnings and overlaps are everywhere.
texts = st.text("ab\né", max_size=40)
stop_lists = st.lists(st.text("ab\né", min_size=1, max_size=4), min_size=1, max_size=4)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    found = []
    for piece in pieces:
        found.append(finder.push(piece))
        if finder.found:
            return "".join(found), True
    return "".join(found) + finder.flush(), False


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: stop where any stop string is complete, at the longest that ends there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(texts, stop_lists, st.data())
def test_any_split_shows_the_text_before_the_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(pieces, stops) == reference(text, stops)
    assert before_stop(text, stops) == reference(text, stops)[0]


@given(texts, stop_lists)
def test_no_part_of_a_stop_string_is_shown_early(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    sent = ""
    for character in text:
        sent += finder.push(character)
        assert not finder.found or sent == before_stop(text, stops)
        if finder.found:
            return
    assert text.startswith(sent)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one\n", "\ntwo"], ["\n\n"], "one"),
        (["abc"], ["abcd", "bc"], "a"),  # "bc" is complete first
        (["ab", "x"], ["abc"], "abx"),  # opened, never closed
        (["a", "a", "b"], ["aab"], ""),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: str) -> None:
    assert shown(pieces, stops)[0] == expected
