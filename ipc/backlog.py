"""The engine's outbox: events and token records on their way into two rings, in one order.

Promises: an item enters its ring only after every item before it did, so an event published before a record is in the
event ring before the record is in the token ring. What does not fit waits here, within a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ipc.errors import BacklogFullError, MessageTooLargeError
from ipc.layout import TOKEN_BYTES
from ipc.ring import MESSAGE_OVERHEAD, MessageWriter, TokenWriter

# Hundreds of full steps. The loop stops stepping at the first item left here, so more means that it does not:
# an error then, before a server that went away costs the machine its memory.
MAX_BACKLOG_BYTES: Final = 16 << 20

_Item = bytes | npt.NDArray[np.void]


def _size(item: _Item) -> int:
    return len(item) if isinstance(item, bytes) else len(item) * TOKEN_BYTES


class Backlog:
    """A first-in-first-out queue in front of an event ring of `event_bytes` and a token ring."""

    def __init__(self, events: MessageWriter, event_bytes: int, tokens: TokenWriter) -> None:
        self._events = events
        self._tokens = tokens
        self._max_event = event_bytes - MESSAGE_OVERHEAD
        self._items: deque[_Item] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def publish(self, records: npt.NDArray[np.void], events: Sequence[bytes]) -> None:
        """Push the encoded events, then the `[n]` TOKEN_DTYPE records; keep what does not fit.

        Takes nothing and raises MessageTooLargeError for an event that the empty ring could not hold, BacklogFullError
        if what waits from before would grow above MAX_BACKLOG_BYTES.
        """
        if events or self._items:  # most steps have neither
            self._check(records, events)
        for event in events:
            if self._items or not self._events.push(event):
                self._keep(event)
        taken = 0 if self._items else self._tokens.push(records)
        if taken < len(records):
            self._keep(records[taken:].copy())  # the engine may use its array again

    def flush(self) -> bool:
        """Push what fits, oldest first. True: nothing waits any more."""
        while self._items:
            item = self._items[0]
            left = self._push(item)
            if left is not None:
                self._items[0] = left
                self._bytes -= _size(item) - _size(left)
                return False
            self._items.popleft()
            self._bytes -= _size(item)
        return True

    def _push(self, item: _Item) -> _Item | None:
        """What of `item` did not fit."""
        if isinstance(item, bytes):
            return None if self._events.push(item) else item
        taken = self._tokens.push(item)
        return item[taken:] if taken < len(item) else None

    def _keep(self, item: _Item) -> None:
        self._items.append(item)
        self._bytes += _size(item)

    def _check(self, records: npt.NDArray[np.void], events: Sequence[bytes]) -> None:
        for event in events:
            if len(event) > self._max_event:
                raise MessageTooLargeError(f"an event of {len(event)} bytes is above {self._max_event}")
        size = sum(map(len, events)) + _size(records)
        if self._items and self._bytes + size > MAX_BACKLOG_BYTES:
            raise BacklogFullError(f"{self._bytes} bytes wait for the server and {size} more came in")
