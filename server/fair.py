"""A waiting line that is fair between keys: whoever was served least goes next, first come first served within a key.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a key's tag advances by the cost of what it was served, a key that
comes back from idleness starts at the line's clock. So a flood of one key delays another by one item at most, and
idleness saves up nothing. Knows nothing about requests, ranks or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Tags of idle keys are forgotten once there are this many: by then most lie behind the clock and mean nothing.
MAX_IDLE_TAGS: Final = 1024


class FairLine(Generic[T]):
    """Items with costs, by key."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[tuple[int, T]]] = {}
        self._costs: dict[str, int] = {}
        self._tags: dict[str, int] = {}
        self._clock = 0
        self._length = 0
        self.cost = 0  # of all items together

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """All items, in no promised order."""
        return (item for line in self._lines.values() for _, item in line)

    def cost_of(self, key: str) -> int:
        """Cost of this key's items."""
        return self._costs.get(key, 0)

    def push(self, key: str, cost: int, item: T) -> None:
        """Put an item at the end of its key's line; `cost` is positive."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
            self._tags[key] = max(self._tags.get(key, 0), self._clock)
        line.append((cost, item))
        self._count(key, cost, 1)

    def next(self) -> tuple[int, T] | None:
        """Cost and item that `pop` would take."""
        return self._lines[self._next_key()][0] if self._lines else None

    def pop(self) -> T:
        """Take the next item. Raises IndexError when there is none."""
        if not self._lines:
            raise IndexError("pop from an empty line")
        key = self._next_key()
        cost, item = self._lines[key].popleft()
        self._clock = self._tags[key]
        self._tags[key] += cost
        self._count(key, -cost, -1)
        return item

    def remove(self, key: str, item: T) -> bool:
        """Take an item out of turn; False when it is not here."""
        for entry in self._lines.get(key, ()):
            if entry[1] is item:
                self._lines[key].remove(entry)
                self._count(key, -entry[0], -1)
                return True
        return False

    def _next_key(self) -> str:
        # Keys are few: each is a customer with something waiting on this very rank.
        return min(self._lines, key=self._tags.__getitem__)

    def _count(self, key: str, cost: int, items: int) -> None:
        self.cost += cost
        self._length += items
        self._costs[key] = self._costs.get(key, 0) + cost
        if not self._lines[key]:
            del self._lines[key], self._costs[key]
            self._forget_idle()

    def _forget_idle(self) -> None:
        if not self._lines:
            # A busy period is over: nobody waits whom the past could be held against.
            self._tags.clear()
            self._clock = 0
        elif len(self._tags) - len(self._lines) > MAX_IDLE_TAGS:
            self._tags = {key: tag for key, tag in self._tags.items() if key in self._lines or tag > self._clock}
