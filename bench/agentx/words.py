"""Words of one tokenizer whose text gives back exactly their tokens, in any order: what prompts are built of.

A block is a lead, one digit or mark, and then words of one token each. The lead carries no white space, so a template
that trims a message takes nothing off it. Words whose tokens change beside others are found out by trying and left
out; a tokenizer with too few left is refused. Only the last block of a text may have a single token. Knows nothing
about traces.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.agentx.errors import VocabularyError
from server.tokenizer.load import TextTokenizer

Ids = npt.NDArray[np.int64]

# Words as natural text has them; tokenizers without merges have letters only.
SHAPES: Final = (re.compile(r" [a-z]{2,12}"), re.compile(r"[a-z]"))
# Digits first: nearly all tokenizers keep them apart from whatever stands before.
LEADS: Final = ("1", "2", ".", ":", "-")
# Frequent words have the lowest ids; more of them would only take longer to verify.
MAX_WORDS: Final = 2048
# With fewer, blocks of a handful of tokens would meet by chance.
MIN_WORDS: Final = 16
# Each round tries all words in a new order, so beside new neighbours.
ROUNDS: Final = 4
# What a template writes around a message ends in such characters, and the lead must not merge with them.
SURROUNDINGS: Final = ("\n", "\n\n", ">")

Encode = Callable[[str], list[int]]


class Words:
    """Verified words and the blocks of text they make."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Raises VocabularyError."""
        self._encode: Encode = lambda text: tokenizer.backend.encode(text, add_special_tokens=False).ids
        ids = sorted(tokenizer.backend.get_vocab(with_added_tokens=False).values())
        texts = {id_: tokenizer.token_text(id_) for id_ in ids}
        by_text = {text: id_ for id_, text in reversed(texts.items())}
        for lead in (lead for lead in LEADS if lead in by_text):
            for shape in SHAPES:
                words = [id_ for id_, text in texts.items() if shape.fullmatch(text)][:MAX_WORDS]
                words = _verified(by_text[lead], words, texts, self._encode)
                if len(words) >= MIN_WORDS:
                    self._lead, self._words, self._texts = by_text[lead], words, texts
                    return
        raise VocabularyError(f"the tokenizer has fewer than {MIN_WORDS} words that keep their tokens beside others")

    def __len__(self) -> int:
        return len(self._words)

    def ids(self, key: str, size: int) -> list[int]:
        """The tokens of a block: `size` of them, a function of `key`; a shorter block is the beginning of a longer."""
        if size <= 0:
            return []
        draws = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * (size - 1)), "<u4")
        return [self._lead, *(self._words[draw] for draw in draws % len(self._words))]

    def block(self, key: str, size: int) -> str:
        """Their text."""
        return "".join(self._texts[id_] for id_ in self.ids(key, size))


def _verified(lead: int, words: list[int], texts: dict[int, str], encode: Encode) -> list[int]:
    """The words that keep their tokens, the lead too wherever a message may begin."""
    if any(encode(text + texts[lead])[-1:] != [lead] for text in SURROUNDINGS):
        return []
    kept = [id_ for id_ in words if encode("".join(texts[one] for one in (lead, id_, lead))) == [lead, id_, lead]]
    for order in _orders(kept):
        kept = _without_breakers(kept, [id_ for id_ in order if id_ in set(kept)], texts, encode)
    return kept


def _orders(words: Sequence[int]) -> Iterator[list[int]]:
    draw = random.Random(1)
    for _ in range(ROUNDS):
        yield draw.sample(words, len(words))


def _without_breakers(words: list[int], order: list[int], texts: dict[int, str], encode: Encode) -> list[int]:
    """Of `words` those that keep their tokens in this order; the two around each difference are left out."""
    broken: set[int] = set()
    while order:
        found = encode("".join(texts[id_] for id_ in order))
        if found == order:
            break
        at = next((at for at, pair in enumerate(zip(found, order, strict=False)) if pair[0] != pair[1]), len(order) - 1)
        broken.update(order[max(at - 1, 0) : at + 1])
        order = order[at + 1 :]
    return [id_ for id_ in words if id_ not in broken]
