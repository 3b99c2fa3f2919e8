"""Who was used least recently: a list of small integers, linked through columns.

Every operation on one takes constant time and makes no object: a million members cost the garbage collector nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

# Stands in `_after` for a number that is not in the list.
_OUT: Final = -1


class LruList:
    """Numbers below `size` in the order of their use, each at most once."""

    def __init__(self, size: int) -> None:
        # One number more stands before the first and after the last.
        self._edge: Final = size
        self._links: Final = np.full((2, size + 1), _OUT, np.int32)
        # What comes after each number; -1 stands for one that is not in the list.
        self.after: Final = self._links[1]
        self._before: Final = self._links[0].data
        self._after: Final = self._links[1].data
        self.clear()

    def clear(self) -> None:
        """Empty the list."""
        self._links.fill(_OUT)
        self._before[self._edge] = self._after[self._edge] = self._edge

    def __contains__(self, number: int) -> bool:
        inside: bool = self._after[number] != _OUT
        return inside

    def first(self) -> int:
        """The one used least recently, or -1."""
        number = self._after[self._edge]
        return -1 if number == self._edge else number

    def touch(self, number: int) -> None:
        """Make it the one used last; it need not be in the list."""
        self.discard(number)
        self._insert(number, self._before[self._edge], self._edge)

    def push_first(self, number: int) -> None:
        """Make it the next one to go; it must not be in the list."""
        assert number not in self
        self._insert(number, self._edge, self._after[self._edge])

    def discard(self, number: int) -> None:
        """Take it out, if it is in the list."""
        after = self._after[number]
        if after == _OUT:
            return
        before = self._before[number]
        self._after[before], self._before[after] = after, before
        self._after[number] = self._before[number] = _OUT

    def _insert(self, number: int, before: int, after: int) -> None:
        self._before[number], self._after[number] = before, after
        self._after[before] = self._before[after] = number
