"""One engine rank as the server sees it: its state, facts, slots and the link to it.

Submits and cancels go out through here; a cancel that finds the ring full is kept and sent later, never lost.
Processes are `supervise.py`'s, what comes back is `collect.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from enum import StrEnum

from ipc.errors import IpcError
from ipc.link import ServerLink
from ipc.messages import Cancel, Facts, Stats, Submit
from server.errors import ApiError
from server.slots import SlotTable
from server.stream import TokenStream


class RankState(StrEnum):
    """Where a rank is in its life; only READY takes requests."""

    LOADING = "loading"
    READY = "ready"
    LOST = "lost"  # dead or hung, to be restarted
    STOPPED = "stopped"


class Rank:
    """State of one rank. The event loop's thread owns it."""

    def __init__(self, index: int, slots: int) -> None:
        self.index = index
        self.state = RankState.LOADING
        self.reason = ""  # why it is lost
        self.became_ready = asyncio.Event()  # set at the first time, and stays so
        self.facts: Facts | None = None
        self.stats: Stats | None = None
        self.slots = SlotTable(slots)
        self.link: ServerLink | None = None
        self.restarts = 0
        self._late_cancels: deque[Cancel] = deque()

    def submit(self, stream: TokenStream, slot: int, request: Submit) -> bool:
        """Hand a request to the rank; on False the ring is full and the slot is free again."""
        sent = False
        try:
            sent = self.link is not None and self.link.send(request)
        finally:
            if not sent:
                self.slots.release(slot)
        if not sent:
            return False
        stream.on_cancel(lambda: self._cancel(Cancel(request.slot, request.generation)))
        return True

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
        self.stats = None
        self._late_cancels.clear()
        streams = self.slots.release_all()
        for stream in streams:
            stream.fail(error)
        return len(streams)
