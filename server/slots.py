"""A rank's request slots: which stream a token record belongs to.

A slot's generation changes at every reuse, so a late token of a request that is gone finds nobody. A slot stays
taken until the rank has ended its request, also when the client left before: what is counted here is what the
rank holds.
"""

from __future__ import annotations

from typing import Final

from server.stream import TokenStream

_GENERATIONS: Final = 2**32


class SlotTable:
    """Fixed number of slots, each free or taken by one stream."""

    def __init__(self, size: int) -> None:
        self._streams: list[TokenStream | None] = [None] * size
        self._generations = [0] * size
        self._free = list(range(size - 1, -1, -1))

    @property
    def size(self) -> int:
        """Slots in all."""
        return len(self._streams)

    @property
    def taken(self) -> int:
        """Requests this rank holds."""
        return len(self._streams) - len(self._free)

    def take(self, stream: TokenStream) -> tuple[int, int] | None:
        """A (slot, generation) for the stream, or None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
        self._streams[slot] = stream
        return slot, self._generations[slot]

    def find(self, slot: int, generation: int) -> TokenStream | None:
        """The stream this record is for; None for a late one, or one no slot was ever given for."""
        if slot >= len(self._streams) or self._generations[slot] != generation:
            return None
        return self._streams[slot]

    def release(self, slot: int) -> None:
        """The rank has ended the slot's request."""
        assert self._streams[slot] is not None
        self._streams[slot] = None
        self._free.append(slot)

    def release_all(self) -> list[TokenStream]:
        """The rank is gone: free every slot and return the streams that were open."""
        open_streams = [stream for stream in self._streams if stream is not None]
        self._streams = [None] * len(self._streams)
        self._free = list(range(len(self._streams) - 1, -1, -1))
        return open_streams

    def streams(self) -> list[TokenStream]:
        """The open ones."""
        return [stream for stream in self._streams if stream is not None]
