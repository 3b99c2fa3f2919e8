"""How many pages may move between device and host in a step, so that running answers hardly notice.

Promises at least one page a step, or copies would never end on a slow machine. Knows nothing about what is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# Of a step's time, for copies beside decodes: they share the device's memory bandwidth, and on a CPU its cores.
COPY_SHARE: Final = 0.1
# Without decodes nobody waits for a next token, but commands and the heartbeat wait for the end of the step.
UNDISTURBED_S: Final = 0.05
# How fast the usual step follows the last ones. The shorter of usual and last counts: neither a lone prompt chunk
# nor a pause between requests may let the next decode wait for a long copy.
FOLLOW: Final = 0.125


class Budget:
    """Pages that may still be copied in this step: `left`. The speed was measured at start; what is slower later (a
    busy machine, checksums) is followed."""

    def __init__(self, pages_per_second: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._fastest = self._pages_per_second = pages_per_second
        self._clock = clock
        self._usual_s = UNDISTURBED_S
        self._renewed, self._copied_s = clock(), 0.0
        self.left = 0

    def renew(self, *, decoding: bool) -> None:
        """A step begins; the time since the last one began, less what copies took, was that step's."""
        now = self._clock()
        last_s = min(now - self._renewed - self._copied_s, UNDISTURBED_S / COPY_SHARE)
        self._renewed, self._copied_s = now, 0.0
        self._usual_s += FOLLOW * (last_s - self._usual_s)
        seconds = COPY_SHARE * min(last_s, self._usual_s) if decoding else UNDISTURBED_S
        self.left = max(1, int(seconds * self._pages_per_second))

    def spend(self, pages: int, since: float) -> None:
        """So many pages were copied since then, by `now`."""
        seconds = max(self._clock() - since, 1e-9)
        self._copied_s += seconds
        self.left = max(0, self.left - pages)
        if pages:
            seen = min(pages / seconds, self._fastest)
            self._pages_per_second += FOLLOW * (seen - self._pages_per_second)

    def now(self) -> float:
        """Seconds, for `spend`."""
        return self._clock()
