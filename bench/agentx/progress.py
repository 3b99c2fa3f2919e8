"""How far a replay is, on stderr: a line that is written over on a terminal, else a line now and then.

Knows nothing about what it counts.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TextIO

TERMINAL_S: Final = 0.25
PLAIN_S: Final = 15.0
BAR_CHARS: Final = 24


@dataclass(slots=True)
class State:
    """Counts that the replay keeps up to date; `total` 0: nobody knows how many there will be."""

    total: int = 0
    limit_s: float = float("inf")
    done: int = 0
    failed: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Progress:
    """Shows a state until it is cancelled."""

    def __init__(self, state: State, out: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._out = out
        self._clock = clock
        self._started = clock()

    async def run(self) -> None:
        """Write again and again."""
        terminal = self._out.isatty()
        try:
            while True:
                await asyncio.sleep(TERMINAL_S if terminal else PLAIN_S)
                line = self.line()
                self._out.write(f"\r\x1b[K{line}" if terminal else f"{line}\n")
                self._out.flush()
        finally:
            if terminal:
                self._out.write("\r\x1b[K")
                self._out.flush()

    def line(self) -> str:
        """The present state in words."""
        state = self._state
        elapsed = self._clock() - self._started
        shares = [elapsed / state.limit_s, (state.done + state.failed) / state.total if state.total else 0.0]
        filled = min(BAR_CHARS, round(BAR_CHARS * max(shares)))
        cached = 100 * state.cached_tokens / state.prompt_tokens if state.prompt_tokens else 0.0
        of = f"/{state.total}" if state.total else ""
        return (
            f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}] {elapsed:.0f} s  {state.done}{of} done  "
            f"{state.running} running  {state.failed} failed  {cached:.1f} % cached"
        )
