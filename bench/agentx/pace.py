"""Think times: how long an agent waits between two requests, as recorded, shortened or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Times longer than `cap` seconds count as that long, then `speedup` divides them; `ignore` makes all of them 0."""

    speedup: float = 1.0
    cap: float = float("inf")
    ignore: bool = False

    def seconds(self, recorded: float) -> float:
        """How long to wait for a recorded time."""
        return 0.0 if self.ignore else min(recorded, self.cap) / self.speedup

    async def wait(self, recorded: float) -> None:
        """Wait so long; gives others a turn also where that is no time."""
        await asyncio.sleep(self.seconds(recorded))
