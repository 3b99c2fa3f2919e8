"""Logprobs in OpenAI's two shapes: the chat list and the text completion's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from server.generate import Piece
from server.tokenizer.load import TextTokenizer


def chat_logprobs(tokenizer: TextTokenizer, pieces: Sequence[Piece]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {"content": [_chat_entry(tokenizer, piece) for piece in pieces]}


def text_logprobs(tokenizer: TextTokenizer, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; `offset` is the characters sent before these pieces."""
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
    return {
        "tokens": [tokenizer.token_text(piece.id) for piece in pieces],
        "token_logprobs": [piece.logprob for piece in pieces],
        "top_logprobs": [_best_by_text(tokenizer, piece) for piece in pieces],
        "text_offset": offsets,
    }


def _chat_entry(tokenizer: TextTokenizer, piece: Piece) -> dict[str, Any]:
    entry = _described(tokenizer, piece.id, piece.logprob)
    entry["top_logprobs"] = [_described(tokenizer, id_, logprob) for id_, logprob in _best(piece)]
    return entry


def _described(tokenizer: TextTokenizer, id_: int, logprob: float) -> dict[str, Any]:
    return {"token": tokenizer.token_text(id_), "logprob": logprob, "bytes": list(tokenizer.token_bytes(id_))}


def _best_by_text(tokenizer: TextTokenizer, piece: Piece) -> dict[str, float]:
    # Two ids can share a text; the better one comes first and stays.
    found: dict[str, float] = {}
    for id_, logprob in _best(piece):
        found.setdefault(tokenizer.token_text(id_), logprob)
    return found


def _best(piece: Piece) -> Iterator[tuple[int, float]]:
    return iter(()) if piece.top is None else zip(piece.top.ids, piece.top.logprobs, strict=True)
