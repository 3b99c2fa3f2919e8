"""Device rows where states of ended requests wait until the host has said where they go.

A ring: what is newest stays, and nobody waits for a server that is slow. A state has a name that is never used
again, so that what has been overwritten is known to be gone. Knows nothing about what a state is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hicache.boundaries import last_boundaries

# Boundaries of one answer, the last ones: a next turn repeats it whole, or all but what a chat template trims off it.
STATES_PER_ANSWER: Final = 2


class Staging:
    """`rows` device rows from `first_row` on, which belong to no sequence.

    A sequence of n tokens still has the states of boundaries from `n - window` tokens on, but none before
    `first_state`; `copy(at, to)` copies a state between device rows, in the order of the engine's other work.
    """

    def __init__(
        self, first_row: int, rows: int, copy: Callable[[int, int], object], *, first_state: int, window: int
    ) -> None:
        assert rows > 0
        self._first_row, self._rows, self._copy = first_row, rows, copy
        self._first_state, self._window = first_state, window
        self._last = -1  # name of the newest state

    def boundaries(self, prompt_pages: int, tokens: int) -> list[int]:
        """Boundaries behind a prompt whose states an answer that ended at `tokens` leaves, in pages, last one first."""
        return last_boundaries(
            tokens, prompt_pages, first_state=self._first_state, window=self._window, most=STATES_PER_ANSWER
        )

    def put(self, row: int) -> int:
        """Keep a copy of the state in this row; returns its name."""
        self._last += 1
        self._copy(row, self._row(self._last))
        return self._last

    def find(self, name: int) -> int:
        """The row that holds this state; -1: it is gone."""
        return self._row(name) if self._last - self._rows < name <= self._last and name >= 0 else -1

    def _row(self, name: int) -> int:
        return self._first_row + name % self._rows
