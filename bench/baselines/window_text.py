"""Ids as they come -> text, by decoding a short window twice for every token.

The usual way: text is the difference between the window decoded with and without the newest ids, held back while it
ends in half a character.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


Decode = Callable[[list[int]], str]


class WindowText:
    """One answer's text."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._read = 0  # ids whose text is out

    def push(self, token: int) -> str:
        """The text this id completes; "" while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]
