"""A long text encoded in parts has the ids of the whole, whoever encodes them, and parts are really made."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.tokenizer import parts as module
from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, CacheCounts, HfBackend, Ids
from server.tokenizer.encode import Encoder
from server.tokenizer.fast import FastBackend
from server.tokenizer.load import TextTokenizer, load
from server.tokenizer.parts import PART_CHARACTERS, REACH, Parts
from server.tokenizer.typed import Prompt
from server.tokenizer.workers import Workers
from tests.tokenizer_kinds import DEPENDENT, INDEPENDENT, loaded
from tests.tokenizer_texts import corpus, deepseek_folder, hard_texts

THREADS = 3
SMALL = 40


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers(THREADS, "test")
    yield made
    made.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few characters, so that short texts have many borders near them."""
    monkeypatch.setattr(module, "PART_CHARACTERS", SMALL)
    monkeypatch.setattr(module, "REACH", SMALL)


@cache
def kind(name: str) -> Tokenizer:
    return INDEPENDENT[name]()


def spellings(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in AddedTokens(tokenizer).by_id.values()]


def long_text(seed: int, tokens: list[str], characters: int) -> str:
    """Hard pieces with added tokens between them, now and then one on another's heels."""
    source = random.Random(seed)
    found = ""
    for piece in hard_texts(seed, 10_000, tokens):
        found += piece + source.choice(tokens) * source.choice((0, 1, 1, 2))
        if len(found) >= characters:
            break
    return found


class Noting:
    """A backend that notes what it was given."""

    name, inline_characters = "noting", 0

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.pieces: list[str] = []

    def encode(self, text: str) -> Ids:
        self.pieces.append(text)
        return self._backend.encode(text)

    def counts(self) -> CacheCounts:
        return self._backend.counts()


def noting(tokenizer: Tokenizer) -> Noting:
    return Noting(HfBackend(tokenizer))


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.usefixtures("small_parts")
def test_the_parts_ids_are_the_wholes(name: str, workers: Workers) -> None:
    tokenizer = kind(name)
    backend = noting(tokenizer)
    parts = Parts(AddedTokens(tokenizer), workers)

    @given(st.integers(0, 10_000))
    def check(seed: int) -> None:
        text = long_text(seed, spellings(tokenizer), 10 * SMALL)
        ids = np.concatenate(parts.encode(text, 0, len(text), backend.encode))
        assert np.array_equal(ids, HfBackend(tokenizer).encode(text)), repr(text)

    check()
    texts = 100  # hypothesis' examples
    # Of "two looks" every token can be reached into: it has no borders.
    assert len(backend.pieces) > 3 * texts if name != "two looks" else len(backend.pieces) == texts


@given(seed=st.integers(0, 10_000), start=st.floats(0, 1), end=st.floats(0, 1))
def test_cuts_are_borders_inside_of_the_range_about_a_part_apart(seed: int, start: float, end: float) -> None:
    tokenizer = kind("plain")
    added = AddedTokens(tokenizer)
    text = "<|im_end|>word " * 40_000
    low, high = sorted((int(start * len(text)), int(end * len(text))))
    places = list(Parts(added, Workers(1, "none"))._borders(text, low, high))
    assert all(text.startswith("<|im_end|>", place) for place in places)
    assert all(after - before >= PART_CHARACTERS - REACH for before, after in pairwise([low, *places]))
    assert len(places) >= (high - low) // PART_CHARACTERS - 1


def test_a_text_without_borders_stays_whole(workers: Workers) -> None:
    backend = noting(kind("plain"))
    text = "x\n\ny  " * PART_CHARACTERS
    Parts(AddedTokens(kind("plain")), workers).encode(text, 0, len(text), backend.encode)
    assert backend.pieces == [text]


def test_idle_threads_take_parts_and_give_them_back_in_order(workers: Workers) -> None:
    tokenizer = kind("plain")
    text = "".join(f"{number}<|im_end|>" for number in range(40_000))
    all_here = threading.Barrier(THREADS, timeout=60)
    seen: set[str] = set()

    def encode(piece: str) -> Ids:
        if (name := threading.current_thread().name) not in seen:
            seen.add(name)
            all_here.wait()  # passes only when so many threads encode at once, the caller's among them
        return HfBackend(tokenizer).encode(piece)

    ids = np.concatenate(Parts(AddedTokens(tokenizer), workers).encode(text, 0, len(text), encode))
    assert np.array_equal(ids, HfBackend(tokenizer).encode(text))
    assert len(seen) == THREADS
    assert threading.current_thread().name in seen


def test_an_error_in_a_part_is_the_callers_and_ends_the_rest(workers: Workers) -> None:
    text = "".join(f"{number}<|im_end|>" for number in range(40_000)) + "\ud800"
    with pytest.raises(TypeError):
        Parts(AddedTokens(kind("plain")), workers).encode(text, 0, len(text), HfBackend(kind("plain")).encode)


# ---- as the encoder uses them ----


@pytest.fixture(scope="module")
def deepseek() -> TextTokenizer:
    return load(deepseek_folder())


@pytest.mark.parametrize("make", [HfBackend, FastBackend])
def test_a_cold_prompt_is_cut_and_exact(deepseek: TextTokenizer, make: Callable[[Tokenizer], Backend]) -> None:
    tokens = spellings(deepseek.backend)
    text = ""
    for number in range(100_000):
        at = 1000 * number % len(corpus())
        text += f"{tokens[number % len(tokens)] * (1 + number % 3)}{number}{corpus()[at : at + 1000]}"
        if len(text) > 4 * PART_CHARACTERS:
            break
    backend = Noting(make(deepseek.backend))
    encoder = Encoder(deepseek, backend)
    assert np.array_equal(encoder.encode(text, False), HfBackend(deepseek.backend).encode(text))
    assert len(backend.pieces) >= 4
    encoder.close()


@pytest.mark.usefixtures("small_parts")
def test_a_prompt_in_which_a_token_was_typed_is_not_cut_inside(tmp_path: Path) -> None:
    tokenizer = loaded(kind("plain"), tmp_path)
    backend = noting(tokenizer.backend)
    encoder = Encoder(tokenizer, backend)
    text = "<|im_start|>user words<|im_end|>" * 200
    typed = Prompt(
        f"{text}<|im_start|>{'<|im_end|> typed' * 9}<|im_end|>", ((len(text) + 12, len(text) + 12 + 9 * 16),)
    )
    whole = Encoder(tokenizer, HfBackend(tokenizer.backend))
    ids = encoder.encode_prompt(typed, False)
    ends = int((ids == tokenizer.backend.token_to_id("<|im_end|>")).sum())
    assert ends == 201
    assert np.array_equal(ids, whole.encode_prompt(typed, False))
    encoder.close()
    whole.close()


@pytest.mark.usefixtures("small_parts")
def test_where_pieces_depend_on_each_other_nothing_is_cut(tmp_path: Path) -> None:
    tokenizer = loaded(DEPENDENT["single_word"][0](), tmp_path)
    backend = noting(tokenizer.backend)
    encoder = Encoder(tokenizer, backend)
    text = "<|im_start|>cat<|im_end|>" * 100
    encoder.encode(text, False)
    assert backend.pieces == [text]
    encoder.close()


@pytest.mark.soak
@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.usefixtures("small_parts")
def test_thousands_of_texts_in_parts(name: str, workers: Workers) -> None:
    tokenizer = kind(name)
    reference, parts = HfBackend(tokenizer), Parts(AddedTokens(tokenizer), workers)
    for seed in range(5000):
        text = long_text(seed, spellings(tokenizer), 20 * SMALL)
        ids = np.concatenate(parts.encode(text, 0, len(text), reference.encode))
        assert np.array_equal(ids, reference.encode(text)), repr(text)
