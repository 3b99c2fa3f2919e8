"""Ids as they come -> text, by decoding a short window twice for every token.

The usual way: text is the difference between the window decoded with and without the newest ids, held back while it
ends in half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """`tokenizers.Tokenizer`, as far as this needs it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ...


class WindowText:
    """One answer's text."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._read = 0  # ids whose text is out

    def push(self, token: int) -> str:
        """The text this id completes; "" while a character is incomplete."""
        self._ids.append(token)
        before = self._decoder.decode(self._ids[self._start : self._read])
        after = self._decoder.decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]
