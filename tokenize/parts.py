"""A long text in parts that several threads encode at once.

It is cut only at borders (`AddedTokens.last_border`), where the ids of both sides simply join, so the ids are those of
the whole. Threads that have something else to do are left alone: then the caller's thread does all of it, part by part.
Knows nothing about prompts or caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Ids
from server.tokenizer.workers import Workers

# The fastest backend takes half a millisecond for it: several times what handing it to another thread costs.
PART_CHARACTERS: Final = 96 * 1024
# How far before such a length a border is looked for: a message's length. Parts may be as long as they come; a text
# without borders must not be searched again and again.
REACH: Final = PART_CHARACTERS // 4


class Parts:
    """Encodes long texts with the help of idle threads. Thread-safe."""

    def __init__(self, added: AddedTokens, workers: Workers) -> None:
        """For a tokenizer that encodes the pieces between its added tokens independently."""
        self._added = added
        self._workers = workers

    def encode(self, text: str, start: int, end: int, encode: Callable[[str], Ids]) -> list[Ids]:
        """Ids of text[start:end], to be joined; both are borders or ends of the text. Raises what `encode` raises."""
        places = [start, *self._borders(text, start, end), end]
        todo = deque(enumerate(pairwise(places)))
        found: dict[int, Ids] = {}

        def work() -> None:
            while todo:
                try:
                    number, (low, high) = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                found[number] = encode(text[low:high])

        # As many threads as there are workers, the caller's among them: the other cores are for loop and engines.
        helpers = self._workers.lend(work, min(len(todo), self._workers.size) - 1)
        try:
            work()
        finally:
            todo.clear()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        return [found[number] for number in range(len(places) - 1)]

    def _borders(self, text: str, start: int, end: int) -> Iterator[int]:
        """Where to cut: about PART_CHARACTERS apart, and none near the end."""
        low = start
        high = start + PART_CHARACTERS
        while high + REACH <= end:
            border = self._added.last_border(text, max(low, high - REACH), high)
            if border is not None:
                yield border
                low = border
            high += PART_CHARACTERS
