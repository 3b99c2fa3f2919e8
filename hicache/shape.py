"""How large the host pool is: rows of pages and rows of states.

Plain numbers that server and engine both know; nothing here maps, reads or asks the machine.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ipc.messages import CacheAttach

# Slots travel as uint32 and an index entry costs about a kilobyte: a million pages a rank are 134 million tokens.
MAX_PAGES_PER_RANK: Final = 1 << 20
# The largest pool that is chosen by itself, a rank: 38 million tokens of the model with the smallest pages.
MAX_AUTO_BYTES: Final = 32 << 30
# Of the memory that can be had at start, for the pools of all ranks: the device pools of CPU ranks may take
# three times as much later, and page cache keeps the next start fast.
AUTO_SHARE: Final = 0.1


class PoolShape(NamedTuple):
    """Rows and their sizes, in the order of `ipc.messages.CacheAttach`."""

    pages: int
    page_bytes: int
    states: int
    state_bytes: int

    @property
    def pages_size(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    @property
    def states_size(self) -> int:
        """Bytes of all states."""
        return self.states * self.state_bytes

    @property
    def size(self) -> int:
        """Bytes of the whole pool."""
        return self.pages_size + self.states_size

    def message(self) -> CacheAttach:
        """The same, as the ranks are told."""
        return CacheAttach(*self)

    @classmethod
    def of(cls, message: CacheAttach) -> PoolShape:
        """The shape that a rank was told."""
        return cls(message.pages, message.page_bytes, message.states, message.state_bytes)


def shape_for(bytes_per_rank: int, ranks: int, page_bytes: int, states_per_rank: int, state_bytes: int) -> PoolShape:
    """The pool of all ranks: as many whole pages as fit, and states on top where the model has any (`state_bytes`).

    May have no pages at all, where not one fits; `preflight` refuses that.
    """
    pages = min(bytes_per_rank // page_bytes, MAX_PAGES_PER_RANK) * ranks
    states = states_per_rank * ranks if state_bytes else 0
    return PoolShape(pages, page_bytes, states, state_bytes)


def auto_bytes(available: int, ranks: int, page_bytes: int) -> int:
    """Bytes of pages per rank where nobody said how many, out of `available` bytes of memory; whole pages."""
    room = min(MAX_AUTO_BYTES, int(available * AUTO_SHARE) // ranks, MAX_PAGES_PER_RANK * page_bytes)
    return max(0, room) // page_bytes * page_bytes
