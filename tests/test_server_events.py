"""Event writers: native and Python give the same bytes, whose texts are the decoded ids."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server._events import EventWriter as NativeWriter
from server._events import PieceTable
from server.events import EventWriter, EventWriters, PyEventWriter
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import VOCAB_SIZE, write_model

HEAD, TAIL = b'data: {"text":', b"}\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("model")))


def writers(tokenizer: TextTokenizer, *, skip_empty: bool) -> tuple[EventWriter, EventWriter]:
    made = EventWriters(tokenizer)
    assert made.native
    native = made.writer(HEAD, TAIL, skip_empty=skip_empty)
    return native, PyEventWriter(tokenizer.pieces, HEAD, TAIL, skip_empty=skip_empty)


def ids_of(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


utf8 = st.text(max_size=12).map(lambda text: list(text.encode()))
anything = st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=12)
pushes = st.lists(utf8 | anything, max_size=6)


@given(pushes, st.booleans())
def test_native_and_python_write_the_same(tokenizer: TextTokenizer, pushes: list[list[int]], skip_empty: bool) -> None:
    native, python = writers(tokenizer, skip_empty=skip_empty)
    for tokens in pushes:
        assert native.push(ids_of(tokens)) == python.push(ids_of(tokens))
    assert native.flush() == python.flush()


@given(pushes)
def test_texts_join_to_the_decoded_ids(tokenizer: TextTokenizer, pushes: list[list[int]]) -> None:
    native, _ = writers(tokenizer, skip_empty=False)
    events = b"".join(native.push(ids_of(tokens)) for tokens in pushes)
    texts = [json.loads(event.removeprefix(b"data: "))["text"] for event in events.split(b"\n\n")[:-1]]
    flat = [token for tokens in pushes for token in tokens]
    assert len(texts) == len(flat)  # one event a token, text or not
    assert "".join(texts) + native.flush() == tokenizer.decode(flat)


@given(utf8, st.integers(0, VOCAB_SIZE - 1))
def test_text_goes_on_where_push_ended(tokenizer: TextTokenizer, tokens: list[int], last: int) -> None:
    native, python = writers(tokenizer, skip_empty=True)
    assert native.push(ids_of(tokens)) == python.push(ids_of(tokens))
    assert native.text(last) == python.text(last)
    assert native.flush() == python.flush()


def test_ids_outside_the_table_add_nothing(tokenizer: TextTokenizer) -> None:
    native, _ = writers(tokenizer, skip_empty=False)
    assert native.push(ids_of([-1, 2**31 - 1])) == 2 * (HEAD + b'""' + TAIL)
    assert native.text(-1) == ""


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        PieceTable(["text"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        NativeWriter(object(), HEAD, TAIL)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        NativeWriter(PieceTable([b"a"]), HEAD, TAIL).push([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 bytes"):
        NativeWriter(PieceTable([b"a"]), HEAD, TAIL).push(np.array([1], np.int64))
