"""A rank's rings -> each request's stream: step 9 of a request's path.

Runs when the rank's doorbell is readable, drains in bounded batches, and gives the loop back between two of
them. Events are seen before the records they precede (the link promises it). A record whose generation is over
is counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from ipc.errors import IpcError, RingCorruptError
from ipc.link import Drained, ServerLink
from ipc.messages import Event, Failed, Finish, Flag, Ready, RequestError, Stats, TopLogprobs
from server.errors import EngineRequestError, InvalidRequestError
from server.metrics import Metrics
from server.rank import Rank, RankState
from server.stream import Token, TokenStream

log = logging.getLogger(__name__)

# Records handed out before other callbacks get their turn: about a millisecond of work.
RECORDS_PER_PASS: Final = 1024

_Record = tuple[int, int, int, int, int, float, int, int]  # the fields of TOKEN_DTYPE


class Collector:
    """Reads one link for one rank, from `start` to `stop`."""

    def __init__(self, rank: Rank, link: ServerLink, metrics: Metrics, on_failure: Callable[[str], None]) -> None:
        self._rank = rank
        self._link = link
        self._metrics = metrics
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def start(self) -> None:
        """Listen to the doorbell."""
        self._loop.add_reader(self._link.fileno(), self._on_bell)
        self._drain()

    def stop(self) -> None:
        """Stop listening; what still lies in the rings is left there."""
        self._stopped = True
        self._loop.remove_reader(self._link.fileno())

    def drain_rest(self) -> None:
        """Deliver all that a dead rank left in its rings."""
        while not self._stopped:
            try:
                drained = self._link.drain(RECORDS_PER_PASS)
                self._deliver(drained)
            except IpcError:
                return
            if not drained:
                return

    def _on_bell(self) -> None:
        self._link.acknowledge()
        self._drain()

    def _drain(self) -> None:
        if self._stopped:
            return
        try:
            self._deliver(self._link.drain(RECORDS_PER_PASS))
            self._rank.send_late_cancels()
            if not self._stopped and not self._link.arm():
                self._loop.call_soon(self._drain)
        except IpcError as error:
            self._on_failure(f"its link is broken: {error}")

    def _deliver(self, drained: Drained) -> None:
        for error in drained.errors:
            log.error("rank %d sent an event that cannot be read: %s", self._rank.index, error)
        for event in drained.events:
            self._take(event)
        touched: set[TokenStream] = set()
        for record in drained.records.tolist():
            stream = self._hand_out(record)
            if stream is not None:
                touched.add(stream)
        for stream in touched:
            stream.wake()

    def _hand_out(self, record: _Record) -> TokenStream | None:
        slot, generation, token, flags, finish, logprob, position, time_ns = record
        stream = self._rank.slots.find(slot, generation)
        if stream is None:
            self._metrics.late_records.inc()
            return None
        if flags & Flag.TOKEN:
            top = stream.top.pop(position, None) if flags & Flag.TOP else None
            stream.feed(Token(token, logprob, bool(flags & Flag.EOS), time_ns, top))
        if finish:
            stream.end(_finish_of(finish))
            self._rank.slots.release(slot)
        return stream

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                self._rank.facts = event.facts
                self._rank.state = RankState.READY
                self._rank.reason = ""
                self._rank.became_ready.set()
                log.info("rank %d ready: %s", self._rank.index, event.facts)
            case TopLogprobs():
                stream = self._rank.slots.find(event.slot, event.generation)
                if stream is not None:
                    stream.top[event.position] = event
            case RequestError():
                self._expect_error(event)
            case Stats():
                self._rank.stats = event
            case Failed():
                self._on_failure(event.message)

    def _expect_error(self, event: RequestError) -> None:
        stream = self._rank.slots.find(event.slot, event.generation)
        if stream is not None:
            kind = InvalidRequestError if event.client_fault else EngineRequestError
            stream.expect_error(kind(event.message))


def _finish_of(value: int) -> Finish:
    try:
        return Finish(value)
    except ValueError:
        raise RingCorruptError(f"a token record ends its request with {value}, which is no reason") from None
