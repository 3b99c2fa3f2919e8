"""Cutting at added tokens gives `tokenizers`' ids wherever the conditions hold, and only there."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.tokenizer.added import AddedTokens, spelling_pattern
from server.tokenizer.backend import HfBackend
from server.tokenizer.conditions import why_dependent
from server.tokenizer.segment import SegmentBackend
from tests.tokenizer_kinds import DEPENDENT, INDEPENDENT, plain
from tests.tokenizer_texts import hard_texts

FEW = 250


@cache
def kind(name: str) -> Tokenizer:
    return INDEPENDENT[name]()


def spellings(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in AddedTokens(tokenizer).by_id.values()]


def segment(tokenizer: Tokenizer, cache_bytes: int = 2**20) -> SegmentBackend:
    return SegmentBackend(tokenizer, AddedTokens(tokenizer), cache_bytes)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_is_accepted_is_exact(name: str) -> None:
    tokenizer = kind(name)
    assert why_dependent(tokenizer) is None
    backend, reference = segment(tokenizer), HfBackend(tokenizer)
    for text in hard_texts(4, FEW, spellings(tokenizer)):
        assert np.array_equal(backend.encode(text), reference.encode(text)), repr(text)


pieces = st.lists(st.sampled_from([*spellings(plain()), "a", "  x", "\n", " ", "<|im_st", "o", "é"]), max_size=12)


@given(parts=pieces)
@example(parts=["<|im_", "start|>"])
@example(parts=["<to", "ol>s", "ol>"])
def test_overlapping_tokens_are_found_as_the_reference_finds_them(parts: list[str]) -> None:
    text = "".join(parts)
    assert np.array_equal(segment(kind("plain")).encode(text), HfBackend(kind("plain")).encode(text))


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_is_refused_is_named(name: str) -> None:
    make, reason = DEPENDENT[name]
    found = why_dependent(make())
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("single_word", "cat<|im_start|>cats con<|im_start|>cat<|im_end|>x"),
        ("first metaspace", "a b<|im_end|>a"),
        ("truncation", "one<|im_end|>two<|im_end|>three"),
    ],
)
def test_what_is_refused_would_have_been_wrong(name: str, text: str) -> None:
    tokenizer = DEPENDENT[name][0]()
    backend, reference = segment(tokenizer), HfBackend(tokenizer)
    differing = [
        part for part in (text, *hard_texts(5, FEW, spellings(tokenizer))) if not _same(backend, reference, part)
    ]
    assert differing


def _same(backend: SegmentBackend, reference: HfBackend, text: str) -> bool:
    return np.array_equal(backend.encode(text), reference.encode(text))


@given(st.sampled_from(list(INDEPENDENT)), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_text_may_be_cut_at_its_last_border_whatever_follows(name: str, first: int, second: int) -> None:
    tokenizer = kind(name)
    reference = HfBackend(tokenizer)
    added = AddedTokens(tokenizer)
    (text,) = hard_texts(first, 1, spellings(tokenizer))
    border = added.last_border(text, 0, len(text))
    if border is None:
        return
    head = reference.encode(text[:border])
    for tail in (text[border:], *(text[border:] + more for more in hard_texts(second, 3, spellings(tokenizer)))):
        joined = np.concatenate((head, reference.encode(tail)))
        assert np.array_equal(reference.encode(text[:border] + tail), joined), repr((text[:border], tail))


def test_borders_are_tokens_no_other_can_reach_into() -> None:
    added = AddedTokens(kind("plain"))
    text = "a<|im_end|>b<tool>s\n\n\n<|im_start|>x\n\ny"
    assert added.last_border(text, 0, len(text)) == text.index("<|im_start|>")
    assert added.last_border(text, 0, text.index("<|im_start|>")) == text.index("<tool>")
    assert added.last_border(text, 0, text.index("<tool>")) == text.index("<|im_end|>")
    assert added.last_border("none \n\n here", 0, 12) is None


def test_a_border_far_from_the_end_is_found() -> None:
    text = "x<|im_end|>" + "y" * 50_000
    assert AddedTokens(kind("plain")).last_border(text, 0, len(text)) == 1
    assert AddedTokens(kind("plain")).last_border(text, 1, len(text)) is None


@given(st.lists(st.text("ab<|>", min_size=1, max_size=4), min_size=1, max_size=6), st.text("ab<|>", max_size=12))
def test_the_pattern_is_leftmost_and_longest(spelled: list[str], text: str) -> None:
    pattern = spelling_pattern(spelled)
    assert pattern is not None
    match = pattern.search(text)
    found = [(at, -len(one)) for one in spelled for at in range(len(text)) if text.startswith(one, at)]
    assert (match and (match.start(), match.start() - match.end())) == (min(found) if found else None)


def test_pieces_are_remembered() -> None:
    backend = segment(kind("plain"))
    backend.encode("one<|im_end|>two<|im_end|>")
    backend.encode("one<|im_end|>two<|im_end|>three")
    assert (backend.counts().hits, backend.counts().misses) == (2, 3)


def test_the_cache_is_bounded_by_bytes_and_the_oldest_go() -> None:
    backend = segment(kind("plain"), cache_bytes=4000)
    for number in range(100):
        backend.encode(f"keep<|im_end|>number {number}")
        assert backend.counts().bytes <= 4000
    misses = backend.counts().misses
    backend.encode("keep")
    assert backend.counts().misses == misses
    backend.encode("number 0")
    assert backend.counts().misses == misses + 1


def test_threads_share_the_cache() -> None:
    tokenizer = kind("plain")
    backend, reference = segment(tokenizer, cache_bytes=20_000), HfBackend(tokenizer)
    texts = list(hard_texts(6, 60, spellings(tokenizer)))
    expected = [reference.encode(text).tolist() for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts, expected, strict=True):
            if backend.encode(text).tolist() != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend.counts().bytes <= 20_000
