"""Text -> ids: equal to the reference tokenizer's, off the loop when long, and only the new part of what grows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from engine.demo import demo_folder
from server.tokenizer.backend import HF_INLINE_CHARACTERS, SLICE, HfBackend, Ids
from server.tokenizer.choose import choose
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import EncodeError, EncoderClosedError, TokenizerLoadError
from server.tokenizer.lane import SLACK_CHARACTERS
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import BOS, IM_END, byte_tokenizer, write_model
from tests.tokenizer_kinds import DEPENDENT, loaded, plain
from tests.tokenizer_texts import corpus

LONG = "The quick brown fox, 1234 ½ é 日本 🎉\n\n" * 400


@pytest.fixture(scope="module")
def demo_tokenizer() -> TextTokenizer:
    return load(demo_folder())


@pytest.fixture(scope="module", params=["hf", "segment", "fastokens"])
def demo(request: pytest.FixtureRequest, demo_tokenizer: TextTokenizer) -> Iterator[Encoder]:
    encoder = Encoder(demo_tokenizer, choose(demo_tokenizer, request.param).backend)
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


class Watched(HfBackend):
    """Notes the threads it is called in and how much it had to encode."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer.backend)
        self.threads: list[str] = []
        self.characters = 0

    def encode(self, text: str) -> Ids:
        self.threads.append(threading.current_thread().name)
        self.characters += len(text)
        return super().encode(text)


@pytest.fixture
def watched(demo_tokenizer: TextTokenizer) -> Watched:
    return Watched(demo_tokenizer)


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


def test_special_tokens_may_be_added_on_both_ends(tmp_path: Path) -> None:
    made = plain()
    ids = {text: made.token_to_id(text) for text in ("<|bos|>", "<|x|>")}
    made.post_processor = processors.TemplateProcessing(single="<|bos|> $A <|x|>", special_tokens=list(ids.items()))
    encoder = Encoder(loaded(made, tmp_path))
    for text in ("", "hello"):
        assert encoder.encode(text, True).tolist() == made.encode(text).ids
        assert encoder.encode(text, False).tolist() == made.encode(text, add_special_tokens=False).ids


def test_a_post_processor_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.post_processor = processors.TemplateProcessing(single="$A <|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer = loaded(made, tmp_path)
    with pytest.raises(TokenizerLoadError, match="post-processor"):
        Encoder(tokenizer)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = load(write_model(tmp_path)).backend
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Encoder(load(tmp_path)).encode("abcd", False).tolist() == list(b"abcd")


def test_many_ids_are_joined_from_slices(tiny: Encoder) -> None:
    text = "".join(chr(97 + at % 26) for at in range(2 * SLICE + 5))
    assert tiny.encode(text, False).tolist() == list(text.encode())


def test_invalid_unicode_is_refused_with_its_place(demo: Encoder) -> None:
    with pytest.raises(EncodeError, match=r"U\+D800 at character 2"):
        demo.encode("ab\ud800", True)


# ---- what is new ----


def test_a_conversation_that_grows_pays_for_its_new_part(watched: Watched, demo_tokenizer: TextTokenizer) -> None:
    encoder, reference = Encoder(demo_tokenizer, watched), HfBackend(demo_tokenizer.backend)
    prompt, turn = "", 0
    while len(prompt) < 40_000:
        prompt += f"<|im_start|>user\n{turn}: {corpus()[3000 * turn : 3000 * turn + 3000]}<|im_end|>\n"
        opened = prompt + "<|im_start|>assistant\n"
        watched.characters = 0
        assert np.array_equal(encoder.encode(opened, False), reference.encode(opened))
        assert watched.characters < 2 * 3100 + SLACK_CHARACTERS
        prompt = opened + f"answer {turn}<|im_end|>\n"
        turn += 1
    # The first turn has no border but its start, so the second begins from nothing as well.
    assert (encoder.prefix_counts().hits, encoder.prefix_counts().misses) == (turn - 2, 2)
    # One that went another way keeps what it shares.
    other = prompt[:20_000].rpartition("<|im_start|>")[0] + "<|im_start|>user\nsomething else<|im_end|>\n"
    watched.characters = 0
    assert np.array_equal(encoder.encode(other, False), reference.encode(other))
    assert watched.characters < 7000
    # The frame stands around the whole, not around parts.
    assert np.array_equal(encoder.encode(prompt, True), encoder._frame.around(reference.encode(prompt)))


def test_where_pieces_depend_on_each_other_nothing_is_reused(tmp_path: Path) -> None:
    tokenizer = loaded(DEPENDENT["single_word"][0](), tmp_path)
    backend = Watched(tokenizer)
    encoder = Encoder(tokenizer, backend)
    text = f"<|im_start|>{corpus()[:4000]}<|im_end|>cat" + "x" * 300
    for _ in range(2):
        backend.characters = 0
        encoder.encode(text, False)
        assert backend.characters == len(text)


async def test_what_was_measured_is_told(demo_tokenizer: TextTokenizer) -> None:
    told: list[tuple[str, int]] = []
    encoder = Encoder(demo_tokenizer, observe=lambda backend, _, tokens: told.append((backend, tokens)))
    ids = await encoder.encode_async("some text", True)
    assert told == [("hf", len(ids))]


# ---- threads ----


async def test_long_text_is_encoded_in_a_thread_with_the_same_ids(
    demo_tokenizer: TextTokenizer, watched: Watched
) -> None:
    encoder = Encoder(demo_tokenizer, watched)
    assert (await encoder.encode_async(LONG, True)).tolist() == encoder.encode(LONG, True).tolist()
    assert watched.threads[0] == "encode_0"
    assert watched.threads[-1] == threading.current_thread().name
    encoder.close()


async def test_short_text_stays_on_the_loop(demo_tokenizer: TextTokenizer, watched: Watched) -> None:
    encoder = Encoder(demo_tokenizer, watched)
    await encoder.encode_async("x" * HF_INLINE_CHARACTERS, True)
    assert watched.threads == [threading.current_thread().name]


async def test_a_short_new_part_of_a_long_text_stays_on_the_loop(
    demo_tokenizer: TextTokenizer, watched: Watched
) -> None:
    encoder = Encoder(demo_tokenizer, watched)
    prompt = f"{LONG}<|im_end|>{'x' * 2 * SLACK_CHARACTERS}"
    await encoder.encode_async(prompt, False)
    watched.threads.clear()
    await encoder.encode_async(prompt + "<|im_end|>more", False)
    assert set(watched.threads) == {threading.current_thread().name}
    encoder.close()


async def test_the_loop_turns_while_a_long_text_is_encoded(demo: Encoder) -> None:
    """The native call drops the interpreter lock: with it held the loop would turn a handful of times."""
    text = "".join(f"{LONG[at % 900 :]}{at}" for at in range(40))
    encoding = asyncio.ensure_future(demo.encode_async(text, True))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 50


def test_every_thread_has_encoded_before_it_gets_a_prompt(demo_tokenizer: TextTokenizer, watched: Watched) -> None:
    encoder = Encoder(demo_tokenizer, watched)
    encoder.warm_up()
    encoder.close()
    for thread in encoder._workers._threads:
        thread.join(60)
    names = [thread.name for thread in encoder._workers._threads]
    assert sorted(watched.threads) == sorted([threading.current_thread().name, *names])


async def test_an_error_in_the_thread_reaches_the_caller(demo: Encoder) -> None:
    with pytest.raises(EncodeError, match=r"U\+DFFF at character 200000"):
        await demo.encode_async("x" * 200_000 + "\udfff", True)


async def test_closing_fails_what_is_encoded_or_waits(tiny: Encoder) -> None:
    waiting = [asyncio.ensure_future(tiny.encode_async(LONG, True)) for _ in range(20)]
    await asyncio.sleep(0)
    tiny.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(end, EncoderClosedError) for end in ends)
    assert all(isinstance(end, np.ndarray | EncoderClosedError) for end in ends)
    with pytest.raises(EncoderClosedError):
        await tiny.encode_async(LONG, True)
