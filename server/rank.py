"""One engine rank as the server sees it: its state, facts, slots, load, and the link to it.

Submits and cancels go out through here; a cancel that finds the ring full is kept and sent later, never lost.
Processes are `supervise.py`'s, what comes back is `collect.py`'s, who may come in is `admission.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from ipc.errors import IpcError
from ipc.link import ServerLink
from ipc.messages import Cancel, Facts, Stats, Submit
from server.errors import ApiError
from server.slots import SlotTable
from server.stream import TokenStream

# Requests given beyond those a rank can run, so that its next step never waits for us.
REQUESTS_AHEAD: Final = 8
# Prompt tokens given ahead, in full steps: more would take the choice of who is next away from admission.
STEPS_AHEAD: Final = 2
# Weight of the newest measurement of the prefill rate: a few seconds of statistics make it.
RATE_WEIGHT: Final = 0.3


class RankState(StrEnum):
    """Where a rank is in its life; only READY takes requests."""

    LOADING = "loading"
    READY = "ready"
    LOST = "lost"  # dead or hung, to be restarted
    STOPPED = "stopped"


class Rank:
    """State of one rank. The event loop's thread owns it."""

    def __init__(self, index: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.index = index
        self.state = RankState.LOADING
        self.reason = ""  # why it is lost
        self.became_ready = asyncio.Event()  # set at the first time, and stays so
        self.facts: Facts | None = None
        self.stats: Stats | None = None
        self.slots = SlotTable(max_num_seqs + REQUESTS_AHEAD)
        self.link: ServerLink | None = None
        self.restarts = 0
        self.pending_tokens = 0  # prompt tokens promised or submitted, the first output not seen
        self.prefill_rate = 0.0  # prompt tokens a second; 0 while unknown
        self.on_room: Callable[[int], None] = lambda index: None  # told when a request got on or ended
        self._tokens_ahead = max_num_batched_tokens * STEPS_AHEAD
        self._promised = 0
        self._room_made = False
        self._measured: tuple[float, int] | None = None
        self._late_cancels: deque[Cancel] = deque()

    # ---- load, as admission sees it ----

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.state is RankState.READY

    @property
    def load(self) -> int:
        """Requests it holds or was promised."""
        return self.slots.taken + self._promised

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of that length would start soon; one longer than the bound goes alone."""
        fits = self.pending_tokens == 0 or self.pending_tokens + tokens <= self._tokens_ahead
        return fits and self.load < self.slots.size

    def promise(self, tokens: int) -> None:
        """Keep room for a prompt."""
        self._promised += 1
        self.pending_tokens += tokens

    def forget(self, tokens: int) -> None:
        """The promised prompt was submitted (and counts by itself), or will not come."""
        self._promised -= 1
        self.pending_tokens -= tokens
        self._room_made = True

    def prefilled(self, stream: TokenStream) -> None:
        """The stream's prompt needs no more computing: its first token is there, or its end. Twice is once."""
        self.pending_tokens -= stream.prompt_tokens
        stream.prompt_tokens = 0
        self._room_made = True

    def made_room(self) -> None:
        """Tell admission, once for all that ended since the last call."""
        if self._room_made:
            self._room_made = False
            self.on_room(self.index)

    # ---- what the rank says ----

    def ready_with(self, facts: Facts) -> None:
        """The rank takes requests from now on."""
        self.facts = facts
        self.state = RankState.READY
        self.reason = ""
        self.became_ready.set()
        self._room_made = True

    def measured(self, stats: Stats, now: float) -> None:
        """Take statistics in, and from two of them the prefill rate of the time between."""
        was_idle = self.stats is not None and not self.stats.running and not self.stats.waiting
        self.stats = stats
        before, self._measured = self._measured, (now, stats.prefill_tokens)
        # A time that began in idleness says how rarely somebody asks, not how fast the rank is.
        if was_idle or before is None or now <= before[0] or stats.prefill_tokens <= before[1]:
            return
        rate = (stats.prefill_tokens - before[1]) / (now - before[0])
        self.prefill_rate += (rate - self.prefill_rate) * (RATE_WEIGHT if self.prefill_rate else 1.0)

    # ---- what goes out ----

    def submit(self, stream: TokenStream, slot: int, request: Submit) -> bool:
        """Hand a request to the rank; on False the ring is full and the slot is free again."""
        sent = False
        try:
            sent = self.link is not None and self.link.send(request)
        finally:
            if not sent:
                self.slots.release(slot)
        if sent:
            self.pending_tokens += stream.prompt_tokens
            stream.on_cancel(lambda: self._cancel(Cancel(request.slot, request.generation)))
        return sent

    def _cancel(self, cancel: Cancel) -> None:
        self._late_cancels.append(cancel)
        # A broken link is the supervisor's to find: nobody's way out of a request may fail over it.
        with contextlib.suppress(IpcError):
            self.send_late_cancels()

    def send_late_cancels(self) -> None:
        """Send the cancels that are due, as far as the ring takes them. Raises RingCorruptError."""
        while self._late_cancels and self.link is not None and self.link.send(self._late_cancels[0]):
            self._late_cancels.popleft()

    def lose(self, reason: str, error: ApiError) -> int:
        """The process is gone: end every open request with the error. Returns how many there were."""
        self.state = RankState.LOST
        self.reason = reason
        self.stats = self._measured = None
        self._late_cancels.clear()
        streams = self.slots.release_all()
        for stream in streams:
            self.prefilled(stream)
            stream.fail(error)
        return len(streams)
