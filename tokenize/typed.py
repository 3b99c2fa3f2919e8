"""Special tokens that a user typed: where they stand, and the ids of the text around them when they stay plain text.

A control token is an added token that is marked special or is spelled <|like this|> (also with the full-width bars of
DeepSeek, whose role tokens are not marked). Others, such as <think> or a run of spaces, mean in a user's text what
they mean to `tokenizer.encode`. Where a renderer names every token it writes, all added tokens are control tokens.
Knows nothing about messages.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from server.tokenizer.added import AddedTokens, Match, spelling_pattern
from server.tokenizer.backend import Ids, ids_of
from server.tokenizer.prefix import Ranges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKUP: Final = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
# All spellings begin with one of a few such openings in practice, so a text without them is told by plain searches.
OPENING: Final = 2
MAX_OPENINGS: Final = 8
RARE: Final = ("|", "｜")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and the ranges of it, ascending and apart, whose control tokens are only text."""

    text: str
    plain: Ranges = ()


def prompt_of(segments: Sequence[tuple[str, bool]]) -> Prompt:
    """Segments of (text, whether special tokens count in it) as a prompt."""
    plain: list[tuple[int, int]] = []
    at = 0
    for text, special in segments:
        if text and not special:
            start = plain.pop()[0] if plain and plain[-1][1] == at else at
            plain.append((start, at + len(text)))
        at += len(text)
    return Prompt("".join(text for text, _ in segments), tuple(plain))


class Controls:
    """The control tokens of one tokenizer."""

    def __init__(self, backend: Tokenizer, added: AddedTokens, *, independent: bool, every: bool = False) -> None:
        """`independent`: whether the tokenizer encodes the pieces between its added tokens independently.

        `every`: whether all added tokens are control tokens.
        """
        self._backend = backend
        self._added = added
        self.ids: Final = frozenset(
            id_ for id_, token in added.by_id.items() if every or token.special or MARKUP.fullmatch(token.content)
        )
        # A normalized token is found in a text that is no longer the user's: its place there says nothing.
        hidden = not added.raw_text and any(added.by_id[id_].normalized for id_ in self.ids)
        self.can_tell: Final = independent and not hidden
        spellings = [added.by_id[id_].content for id_ in self.ids]
        self._longest = max(map(len, spellings), default=0)
        self._pattern = spelling_pattern(spellings)
        self._first = frozenset(spelling[0] for spelling in spellings)
        self._beginnings = frozenset(one[:size] for one in spellings for size in range(1, len(one)))
        # With the one of the two characters that code has less of: searching for one is ten times faster.
        self._openings = frozenset((one[:OPENING], one[1] if one[1:2] in RARE else one[0]) for one in spellings)
        self._plain: Tokenizer | None = None
        self._lock = threading.Lock()

    def may_spell(self, text: str) -> bool:
        """Whether a control token is spelled in the text or could begin at its end."""
        if self._pattern is None:
            return False
        ending = text[1 - self._longest :] if self._longest > 1 else ""
        for first in self._first:
            at = ending.find(first)
            while at >= 0:
                if ending[at:] in self._beginnings:
                    return True
                at = ending.find(first, at + 1)
        if len(self._openings) <= MAX_OPENINGS and not any(
            rare in text and one in text for one, rare in self._openings
        ):
            return False
        return self._pattern.search(text) is not None

    def typed(self, prompt: Prompt, start: int) -> bool:
        """Whether one stands, if only in part, in a plain range at or after `start`."""
        return any(self._reaches(prompt.text, low, high, start) for low, high in prompt.plain if high > start)

    def _reaches(self, text: str, low: int, high: int, start: int) -> bool:
        """Whether a control token's spelling overlaps the range, looked for at every place: spellings may overlap."""
        at = max(low - self._longest, start)
        while self._pattern is not None and (match := self._pattern.search(text, at)) is not None:
            if match.start() >= high:
                return False
            if match.end() > low:
                return True
            at = match.start() + 1
        return False

    def plain_range_at(self, prompt: Prompt, place: int) -> int | None:
        """Where the plain range begins which a control token that starts at `place` could touch; None for none."""
        return next((low for low, high in prompt.plain if low < place + self._longest and place < high), None)

    def encode(self, prompt: Prompt, start: int, end: int, encode: Callable[[str], Ids]) -> Ids:
        """Ids of a part of the prompt that begins and ends at borders; control tokens in plain ranges are text.

        The text is cut only at tokens that count, so it has `tokenizer.encode`'s ids where none was typed. Where none
        was, `encode` makes the ids: only pieces with a typed token are slow.
        """
        assert self._pattern is not None
        text = prompt.text[start:end]
        matches = self._added.split(text, lambda match: self._counts(match, prompt.plain, start))
        found, done, piece_start = [], 0, 0
        for piece_end, next_start in [*((match.start, match.end) for match in matches), (len(text), len(text))]:
            piece = text[piece_start:piece_end]
            if self._pattern.search(piece):
                found += [encode(text[done:piece_start]), self._blind(piece)]
                done = piece_end
            piece_start = next_start
        return np.concatenate([*found, encode(text[done:])])

    def _blind(self, piece: str) -> Ids:
        """Ids of a piece in which no control token counts."""
        (encoding,) = self._without().encode_batch_fast([piece], add_special_tokens=False)
        return ids_of(encoding)

    def _counts(self, match: Match, plain: Ranges, offset: int) -> bool:
        if match.id not in self.ids:
            return True
        start, end = match.start + offset, match.end + offset
        return not any(low < end and start < high for low, high in plain)

    def _without(self) -> Tokenizer:
        """The tokenizer that reads control tokens as text; made when first needed, as it takes as much memory again."""
        with self._lock:
            if self._plain is None:
                from tokenizers import AddedToken, Tokenizer

                made = Tokenizer.from_str(self._backend.to_str())
                tokens = (made.get_added_tokens_decoder()[id_] for id_ in sorted(self.ids))
                made.add_special_tokens(
                    [
                        AddedToken(one.content, lstrip=one.lstrip, rstrip=one.rstrip, normalized=one.normalized)
                        for one in tokens
                    ]
                )
                made.encode_special_tokens = True
                self._plain = made
            return self._plain
