"""Text -> ids: equal to the reference tokenizer's, and off the loop when long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.demo import demo_folder
from server.tokenizer.encode import INLINE_CHARACTERS, Encoder
from server.tokenizer.errors import EncodeError
from server.tokenizer.load import load
from tests.byte_tokenizer import BOS, IM_END, write_model

LONG = "The quick brown fox, 1234 ½ é 日本 🎉\n\n" * 400


@pytest.fixture(scope="module")
def demo() -> Iterator[Encoder]:
    encoder = Encoder(load(demo_folder()))
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_folder())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Encoder]:
    encoder = Encoder(load(write_model(tmp_path)))
    yield encoder
    encoder.close()


@given(text=st.text())
@example(text=LONG)
@example(text="")
@example(text="<|im_start|>user\n <|im_end|>  12")
def test_ids_are_the_reference_tokenizers(demo: Encoder, reference: PreTrainedTokenizerFast, text: str) -> None:
    for special in (True, False):
        ids = demo.encode(text, special)
        assert ids.dtype == np.int32
        assert ids.tolist() == reference.encode(text, add_special_tokens=special)


def test_special_tokens_are_added_on_demand_and_read_in_text(tiny: Encoder) -> None:
    assert tiny.encode("é<|im_end|>", True).tolist() == [BOS, 0xC3, 0xA9, IM_END]
    assert tiny.encode("é<|im_end|>", False).tolist() == [0xC3, 0xA9, IM_END]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = load(write_model(tmp_path)).backend
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Encoder(load(tmp_path)).encode("abcd", False).tolist() == list(b"abcd")


def test_invalid_unicode_is_refused_with_its_place(demo: Encoder) -> None:
    with pytest.raises(EncodeError, match=r"U\+D800 at character 2"):
        demo.encode("ab\ud800", True)


async def test_long_text_is_encoded_in_a_thread_with_the_same_ids(demo: Encoder) -> None:
    used = _threads_used(demo)
    assert (await demo.encode_async(LONG, True)).tolist() == demo.encode(LONG, True).tolist()
    assert used == ["encode_0", threading.current_thread().name]


async def test_short_text_stays_on_the_loop(demo: Encoder) -> None:
    used = _threads_used(demo)
    await demo.encode_async("x" * INLINE_CHARACTERS, True)
    assert used == [threading.current_thread().name]


async def test_the_loop_turns_while_a_long_text_is_encoded(demo: Encoder) -> None:
    """The Rust call drops the interpreter lock: with it held the loop would turn a handful of times."""
    encoding = asyncio.ensure_future(demo.encode_async(LONG * 20, True))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


async def test_an_error_in_the_thread_reaches_the_caller(demo: Encoder) -> None:
    with pytest.raises(EncodeError, match=r"U\+DFFF at character 2000"):
        await demo.encode_async("x" * 2000 + "\udfff", True)


async def test_closing_drops_what_waits_for_a_thread(tiny: Encoder) -> None:
    waiting = [asyncio.ensure_future(tiny.encode_async(LONG, True)) for _ in range(20)]
    await asyncio.sleep(0)
    tiny.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    assert all(isinstance(end, np.ndarray | asyncio.CancelledError) for end in ends)


def _threads_used(encoder: Encoder) -> list[str]:
    """The threads in which the encoder's backend is called from now on, in order."""
    names: list[str] = []
    backend = encoder._backend

    class Spy:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            names.append(threading.current_thread().name)
            return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    encoder._backend = Spy()  # type: ignore[assignment]
    return names
