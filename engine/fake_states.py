"""Rolling states of the fake engine, as a model has them that keeps part of its memory outside of pages.

The state behind a page follows from the one before it and that page's entries. A sequence keeps its last few in a
ring, so an old one is gone after a while. Goes into the answer: a wrong, missing or misplaced state shows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from engine.fake_rows import U64, mix
from engine.staging import STATES_PER_ANSWER, Staging

WORDS: Final = 8
STATE_BYTES: Final = 8 * WORDS
# What V4.1's bounded replay has: its tail of a prompt, its window of states, the first boundary behind that window.
KEEP_TOKENS: Final = 140
STATE_WINDOW: Final = 652
FIRST_STATE: Final = 256
# Boundaries in a window of 652 tokens are six at most; a state that is loaded lies among them or before.
RING: Final = 8
# Rows for states of ended answers: those of eight, which is more than end while an offer is on its way.
STAGED: Final = 8 * STATES_PER_ANSWER

_LANES: Final = np.arange(1, WORDS + 1, dtype=np.uint64)


class RollingStates:
    """State rows of up to `count` sequences, and STAGED more; `rows` is [count * RING + STAGED, STATE_BYTES] bytes."""

    def __init__(self, count: int) -> None:
        self._words: U64 = np.zeros((count * RING + STAGED, WORDS), np.uint64)
        self.staging: Final = Staging(count * RING, STAGED, self._copy, first_state=FIRST_STATE, window=STATE_WINDOW)

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The rows as bytes, without a copy."""
        return self._words.view(np.uint8)

    def row(self, sequence: int, pages: int) -> int:
        """Where a sequence keeps the state behind so many pages."""
        return sequence * RING + pages % RING

    def start(self, sequence: int) -> None:
        """The state before the first page."""
        self._words[self.row(sequence, 0)] = _LANES

    def advance(self, sequence: int, page: int, entries: U64) -> None:
        """Take in page number `page`, the one behind the last."""
        before = self._words[self.row(sequence, page)]
        self._words[self.row(sequence, page + 1)] = mix(before ^ (entries.sum(dtype=np.uint64) * _LANES))

    def digest(self, sequence: int, pages: int) -> np.uint64:
        """What the state behind so many pages adds to an answer."""
        words: U64 = mix(self._words[self.row(sequence, pages)] * _LANES)
        return np.uint64(np.bitwise_xor.reduce(words))

    def _copy(self, at: int, to: int) -> None:
        self._words[to] = self._words[at]
