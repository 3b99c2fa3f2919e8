"""Deltas of the detokenizer against a one-shot decode, over three kinds of decoder."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine.demo import demo_folder
from server.tokenizer.detok import Detokenizer
from server.tokenizer.errors import TokenizerLoadError
from server.tokenizer.load import load
from server.tokenizer.pieces import Pieces
from tests.byte_tokenizer import EOS, IM_END, VOCAB_SIZE, byte_tokenizer

# Ordinary words, and whatever could upset a decoder: marks and spaces inside, half a byte token, U+FFFD itself.
WORDS = [
    "▁",
    "▁▁",
    "▁the",
    "the",
    "▁ca",
    "é",
    "▁日本",
    "🎉",
    "<think>",
    " ",
    "▁a ▁b",
    "\n",
    "<0x4",
    "\N{REPLACEMENT CHARACTER}",
]


def _vocabulary() -> dict[str, int]:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return {token: i for i, token in enumerate(tokens)}


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|two words▁|>", special=True)])
    tokenizer.add_tokens([AddedToken("<a tool>"), AddedToken("▁▁added")])
    return tokenizer


def _llama_decoder() -> decoders.Decoder:
    strip = decoders.Strip(content=" ", left=1, right=0)
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])


def _byte_level_with_added() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("日本"), AddedToken("Ġé")])
    return tokenizer


def _demo() -> Tokenizer:
    return load(demo_folder()).backend


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "demo": _demo,
    "byte_level": _byte_level_with_added,
    "llama": lambda: _sentencepiece(_llama_decoder()),
    "gemma": lambda: _sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace_always": lambda: _sentencepiece(decoders.Metaspace(prepend_scheme="always")),
    "metaspace_never": lambda: _sentencepiece(decoders.Metaspace(prepend_scheme="never")),
}
every_tokenizer = pytest.mark.parametrize("name", BUILDERS)


@cache
def _tokenizer(name: str) -> Tokenizer:
    return BUILDERS[name]()


@cache
def _pieces(name: str) -> Pieces:
    return Pieces(_tokenizer(name))


def _id(name: str, token: str) -> int:
    found = _tokenizer(name).token_to_id(token)
    assert found is not None
    return found


def _stream(pieces: Pieces, parts: Sequence[Sequence[int]], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(pieces, skip_special=skip_special)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


@st.composite
def _split_ids(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Ids in and just outside the vocabulary, dense in byte tokens, cut anywhere."""
    one = st.one_of(st.integers(0, min(size, 300)), st.integers(max(0, size - 20), size + 2), st.integers(0, size))
    return draw(st.lists(st.lists(one, max_size=6), max_size=25))


@every_tokenizer
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
def test_joined_deltas_are_the_one_shot_decode(name: str, skip_special: bool, data: st.DataObject) -> None:
    tokenizer = _tokenizer(name)
    parts = data.draw(_split_ids(tokenizer.get_vocab_size()))
    ids = [token for part in parts for token in part]
    assert "".join(_stream(_pieces(name), parts, skip_special)) == tokenizer.decode(
        ids, skip_special_tokens=skip_special
    )


@given(text=st.text())
def test_text_survives_token_by_token(text: str) -> None:
    ids = _tokenizer("byte_level").encode(text, add_special_tokens=False).ids
    assert "".join(_stream(_pieces("byte_level"), [[token] for token in ids], skip_special=False)) == text


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_a_character_comes_whole(name: str) -> None:
    offset = {"byte_level": 0, "llama": 2}[name]
    ids = [[byte + offset] for byte in "é🎉".encode()]
    after = _id(name, {"byte_level": "!", "llama": "▁the"}[name])
    deltas = _stream(_pieces(name), [*ids, [after]])
    assert {"byte_level": "é|🎉|!", "llama": "é🎉 the"}[name] == "|".join(delta for delta in deltas if delta)


def test_a_cut_character_shows_at_the_end_only() -> None:
    assert _stream(_pieces("byte_level"), [[0x61, 0xF0, 0x9F], [0x8E]]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_skipped_or_shown() -> None:
    pieces = _pieces("byte_level")
    assert "".join(_stream(pieces, [[0x61, EOS, 0x62], [IM_END]])) == "ab"
    assert "".join(_stream(pieces, [[0x61, EOS, 0x62], [IM_END]], skip_special=False)) == "a<|eos|>b<|im_end|>"


def test_a_special_token_does_not_take_the_leading_space_with_it() -> None:
    start, word = _id("metaspace_always", "<s>"), _id("metaspace_always", "▁the")
    assert "".join(_stream(_pieces("metaspace_always"), [[start], [word], [word]])) == "the the"


def test_flush_leaves_nothing_behind() -> None:
    for name in ("byte_level", "llama"):
        detokenizer = Detokenizer(_pieces(name))
        detokenizer.push([0xE2 + 2])
        assert detokenizer.flush() != ""
        assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_work_per_token_does_not_grow(name: str) -> None:
    """Counted in executed lines of the package: the ten-thousandth token costs what the hundredth does."""
    detokenizer = Detokenizer(_pieces(name))
    letter = _id(name, {"byte_level": "a", "llama": "the"}[name])
    costs = []
    for position in range(10_001):
        if position in {100, 10_000}:
            costs.append(_lines(detokenizer, letter))
        else:
            detokenizer.push([letter])
    assert costs[0] == costs[1]
    assert len(_state(detokenizer)) < 1000


def _lines(detokenizer: Detokenizer, token: int) -> int:
    count = 0

    def trace(*_: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    gc.disable()  # what others do on a collection is no work of ours
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        detokenizer.push([token])
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def _state(detokenizer: Detokenizer) -> str:
    """All that the stream keeps of what it has seen."""
    return repr(vars(detokenizer._joiner))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Fuse, Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "strips"),
        (decoders.Strip(" ", 1, 0), "strips"),
        (decoders.Replace(pattern=Regex("▁+"), content=" "), "pattern"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder: decoders.Decoder, named: str) -> None:
    with pytest.raises(TokenizerLoadError, match=named):
        Pieces(_sentencepiece(decoder))


def test_a_tokenizer_without_decoder_is_refused() -> None:
    with pytest.raises(TokenizerLoadError, match="no decoder"):
        Pieces(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))


def test_pieces_for_logprobs() -> None:
    byte_level, llama = _pieces("byte_level"), _pieces("llama")
    assert (byte_level.text_of(0xC3), byte_level.bytes_of(0xC3)) == ("\N{REPLACEMENT CHARACTER}", b"\xc3")
    assert (byte_level.text_of(EOS), byte_level.bytes_of(EOS)) == ("<|eos|>", b"<|eos|>")
    word = _id("llama", "▁日本")
    assert (llama.text_of(word), llama.bytes_of(word)) == (" 日本", " 日本".encode())
    assert (llama.text_of(2 + 0xE2), llama.bytes_of(2 + 0xE2)) == ("\N{REPLACEMENT CHARACTER}", b"\xe2")
    for outside in (-1, VOCAB_SIZE + 1000, 2**40):
        assert (byte_level.text_of(outside), byte_level.bytes_of(outside)) == ("", b"")


@given(text=st.text())
def test_bytes_of_consecutive_tokens_join_to_the_text(text: str) -> None:
    ids = _tokenizer("byte_level").encode(text, add_special_tokens=False).ids
    assert b"".join(_pieces("byte_level").bytes_of(token) for token in ids) == text.encode()
