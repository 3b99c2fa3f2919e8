"""The part of the CUDA driver that pins memory, without a card: it keeps the rules and counts what is pinned."""

from __future__ import annotations

PAGE = 4096


class FakeDriver:
    """Refuses memory that is pinned already, also in part, and the piece that it is told to refuse."""

    def __init__(self, refuse_piece: int = -1) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self._refuse_piece = refuse_piece

    def register(self, address: int, size: int) -> None:
        self.calls += 1
        if self.calls - 1 == self._refuse_piece:
            raise RuntimeError("out of memory")
        first, last = address // PAGE, (address + size - 1) // PAGE
        for other, other_size in self.pinned.items():
            if first <= (other + other_size - 1) // PAGE and other // PAGE <= last:
                raise RuntimeError("part or all of the requested memory range is already mapped")
        self.pinned[address] = size

    def unregister(self, address: int) -> None:
        if address not in self.pinned:
            raise RuntimeError("pointer does not correspond to a registered memory region")
        del self.pinned[address]
