"""Long work on the event loop, one piece each time the loop goes round.

Eight long prompts that arrive together would otherwise be parsed and rendered in one go, and every stream would wait
for all of them. Short work goes straight through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

# Bytes or characters that take a quarter of a millisecond to parse or render.
LONG: Final = 64 * 1024
# How often the loop goes round before a turn: once for timers and sockets, once more for the tasks that those wake.
ROUNDS: Final = 2


class Turns:
    """Whose turn it is. Serves one loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def breathe(self, size: int) -> None:
        """Return in a turn of one's own, for a step of work on so much that ends before the next await."""
        async with self.turn(size):
            pass  # whoever is next wakes when the loop has gone round

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Hold the turn while working on so much; timers, sockets and the tasks they wake are served first."""
        if size < LONG:
            yield
            return
        async with self._lock:
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            yield
