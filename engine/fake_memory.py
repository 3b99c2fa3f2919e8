"""The fake engine's device memory: an entry a token in pages, and rolling states beside them if it has any.

Promises that an answer's first token depends on every entry of its prompt as it is read back, and on the state behind
its last whole page. Knows rows and blocks, nothing about requests.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from engine.fake_rows import BLOCK_TOKENS, U64, Rows, Running, entries, mix, tokens_of, weighed
from engine.fake_states import RollingStates
from engine.offload import StateRow


class FakeMemory:
    """Pages [blocks, BLOCK_TOKENS], and states of up to `sequences` rows where `has_states`."""

    def __init__(self, blocks: int, sequences: int, *, has_states: bool) -> None:
        self._entries: Final[U64] = np.zeros((blocks, BLOCK_TOKENS), np.uint64)
        self.states: Final = RollingStates(sequences) if has_states else None

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """The pages as bytes [blocks, page_bytes], without a copy."""
        return self._entries.view(np.uint8)

    def state_row(self, row: int) -> StateRow | None:
        """Where a sequence keeps its states; None: it has none."""
        states = self.states
        return None if states is None else lambda pages: states.row(row, pages)

    def start(self, row: int) -> None:
        """A sequence begins with its first token."""
        if self.states is not None:
            self.states.start(row)

    def write(self, rows: Rows, row: int, start: int, count: int) -> None:
        """Compute prompt tokens `start .. start + count`."""
        where = np.arange(start, start + count)
        blocks = rows.blocks[row, where // BLOCK_TOKENS]
        self._entries[blocks, where % BLOCK_TOKENS] = entries(rows.prompt[row][start : start + count], start)
        if self.states is not None:
            for page in range(start // BLOCK_TOKENS, (start + count) // BLOCK_TOKENS):
                self.states.advance(row, page, self._whole(rows, row, page, page + 1))

    def digest(self, rows: Rows, row: int) -> np.uint64:
        """What the answer to a prompt follows from, read back."""
        read = self._all(rows, row)
        digest: np.uint64 = weighed(read, np.arange(len(read))).sum(dtype=np.uint64)
        if self.states is not None:
            digest ^= self.states.digest(row, len(read) // BLOCK_TOKENS)
        return digest

    def append(self, rows: Rows, run: Running, token: U64) -> None:
        """Each running sequence goes on by its token."""
        entry = mix(token | (run.position << np.uint64(32)))
        self._entries[run.next_blocks(rows), run.position % np.uint64(BLOCK_TOKENS)] = entry
        run.advance(entry)
        if self.states is not None:
            for at in np.flatnonzero(run.position % np.uint64(BLOCK_TOKENS) == 0).tolist():
                row, page = int(run.rows[at]), int(run.position[at]) // BLOCK_TOKENS - 1
                self.states.advance(row, page, self._whole(rows, row, page, page + 1))

    def tokens(self, rows: Rows, row: int) -> npt.NDArray[np.int32]:
        """Those of a sequence, read back."""
        return tokens_of(self._all(rows, row))

    def _all(self, rows: Rows, row: int) -> U64:
        where = np.arange(int(rows.length[row]))
        found: U64 = self._entries[rows.blocks[row, where // BLOCK_TOKENS], where % BLOCK_TOKENS]
        return found

    def _whole(self, rows: Rows, row: int, start: int, end: int) -> U64:
        """Entries of whole pages `start .. end`."""
        return self._entries[rows.blocks[row, start:end]].reshape(-1)
