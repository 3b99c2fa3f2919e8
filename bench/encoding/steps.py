"""The encode step, and the whole path from a body's bytes to the message in a rank's ring, in turns in one process.

new words: a conversation about code that was never seen, by an encoder that has served others. cold: another one about
the same code, so its words are known and none of its messages. following: the same as cold, one turn longer.
`tokenizer.encode` is transformers' own, on the rendered text alone; both columns of ratios are against it.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import PreTrainedTokenizerFast

from bench.encoding.conversation import Conversation
from bench.encoding.path import SubmitPath
from server.memory import keep_memory
from server.services import Ids
from server.tokenizer.choose import choose
from server.tokenizer.encode import Encoder
from server.tokenizer.load import TextTokenizer, load

BACKENDS: Final = ("hf", "segment", "fastokens")
TURNS: Final = ("new words", "cold", "following")
CHARACTERS_PER_TOKEN: Final = 4.04  # DeepSeek's tokenizer on this source code
WARM_UP_CHARACTERS: Final = 200_000

Row = dict[str, object]


class WrongIdsError(AssertionError):
    """A backend's ids are not `tokenizer.encode`'s: no figure of it means anything."""


def rows(model: Path, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """For each size and turn a row for `tokenizer.encode`, then one for each backend."""
    keep_memory()  # as the server does
    reference: Any = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer = load(model)
    with ExitStack() as opened:
        ways = [Way(tokenizer, name, opened.enter_context(SubmitPath(model, name))) for name in BACKENDS]
        for way in ways:
            way.warm_up()
        # As the server does: collections need not walk what is loaded by now.
        gc.collect()
        gc.freeze()
        for size in sizes:
            yield from _size_rows(reference, ways, size, rounds)
            for way in ways:
                way.forget()


class Way:
    """One backend: an encoder for the step, and a path whose encoder has caches of its own."""

    def __init__(self, tokenizer: TextTokenizer, name: str, path: SubmitPath) -> None:
        self.name = name
        self.encoder = Encoder(tokenizer, choose(tokenizer, name).backend)
        self.path = path
        self.taken: dict[str, list[tuple[float, float]]] = {turn: [] for turn in TURNS}

    def warm_up(self) -> None:
        """Serve another conversation, as a running server has."""
        other = Conversation(seed=0)
        other.grow(WARM_UP_CHARACTERS)
        self.encoder.warm_up()
        self.encoder.encode("".join(message["content"] for message in other.messages), add_special_tokens=False)
        asyncio.run(self.path.submit(other.body()))

    def measure(self, turn: str, text: str, body: bytes, expected: Ids) -> None:
        """Both, once. Raises WrongIdsError."""
        started = time.perf_counter()
        ids = self.encoder.encode(text, add_special_tokens=False)
        encode = time.perf_counter() - started
        path, submitted = asyncio.run(self.path.submit(body))
        for found in (ids, submitted):
            if not np.array_equal(found, expected):
                raise WrongIdsError(f"{self.name}, {turn}: {len(found)} ids, expected {len(expected)}")
        self.taken[turn].append((encode, path))

    def forget(self) -> None:
        """Figures, not caches."""
        self.taken = {turn: [] for turn in TURNS}


def _size_rows(reference: Any, ways: Sequence[Way], size: int, rounds: int) -> Iterator[Row]:
    plain: dict[str, list[float]] = {turn: [] for turn in TURNS}
    tokens = dict.fromkeys(TURNS, 0)
    for number in range(rounds):
        first, second = (Conversation(seed=size + number, agent=agent) for agent in (0, 1))
        for turn, conversation in zip(TURNS, (first, second, second), strict=True):
            if turn == "following":
                conversation.turn()
            else:
                conversation.grow(int(size * CHARACTERS_PER_TOKEN))
            text = reference.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=True)
            started = time.perf_counter()
            expected = reference.encode(text, add_special_tokens=False)
            plain[turn].append(time.perf_counter() - started)
            tokens[turn] = len(expected)
            for way in ways:
                way.measure(turn, text, conversation.body(), np.array(expected, np.int32))
    for turn in TURNS:
        yield from _turn_rows(turn, tokens[turn], statistics.median(plain[turn]), ways)


def _turn_rows(turn: str, tokens: int, base: float, ways: Sequence[Way]) -> Iterator[Row]:
    head: Row = {"part": "encode", "tokens": tokens, "turn": turn}
    yield {**head, "backend": "tokenizer.encode", "encode_ms": 1e3 * base}
    for way in ways:
        encode, path = (statistics.median(column) for column in zip(*way.taken[turn], strict=True))
        yield {
            **head, "backend": way.name, "encode_ms": 1e3 * encode, "encode_ratio": base / encode,
            "path_ms": 1e3 * path, "path_ratio": base / path,
        }  # fmt: skip
