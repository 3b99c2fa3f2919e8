"""A rank's rings -> each request's stream: step 9 of a request's path.

Runs when the rank's doorbell is readable, drains in bounded batches, and gives the loop back between two of them and
after every few streams. Events are seen before the records they precede (the link promises it). Records are sorted by
request once a batch, so a request is found once a batch and not once a token. A record whose generation is over is
counted and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ipc.errors import IpcError, RingCorruptError
from ipc.link import ServerLink
from ipc.messages import (
    CacheLoaded,
    CacheOffer,
    CacheStore,
    CacheStored,
    Event,
    Failed,
    Finish,
    Flag,
    Loaded,
    Ready,
    RequestError,
    Stats,
    TopLogprobs,
)
from server.cache import Cache
from server.errors import EngineRequestError, InvalidRequestError
from server.metrics import Metrics
from server.rank import Rank
from server.stream import Ids, Records

log = logging.getLogger(__name__)

# A rank that steps faster than this has its tokens delivered some steps at a time: nobody sees a millisecond, and
# each delivery is a system call per stream.
MIN_INTERVAL_S: Final = 0.001
# Records that are read at once.
RECORDS_PER_PASS: Final = 4096
# Streams served before other callbacks get their turn: half a millisecond of work, most of it the kernel's.
STREAMS_PER_PASS: Final = 16

_NS: Final = 1e-9
_NO_GAP: Final = -1
_FINISH: Final = {int(finish): finish for finish in Finish}  # several times faster than Finish(value)


class Collector:
    """Reads one link for one rank, from `start` to `stop`."""

    def __init__(
        self, rank: Rank, link: ServerLink, metrics: Metrics, cache: Cache, on_failure: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._link = link
        self._metrics = metrics
        self._cache = cache
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._drained = 0.0
        self._batch: Sorted | None = None  # read, and not handed out to the end

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
                if self._batch is None and not self._read():
                    return
                self._hand_out(RECORDS_PER_PASS)
            except IpcError:
                return

    def _on_bell(self) -> None:
        self._link.acknowledge()
        self._drain_soon()

    def _drain_soon(self) -> None:
        """At once, unless the last time was just now: then a step or two later, all together."""
        wait = self._drained + MIN_INTERVAL_S - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._drain)
        else:
            self._drain()

    def _drain(self) -> None:
        """One pass: read, unless something read is left, and serve some streams."""
        if self._stopped:
            return
        try:
            if self._batch is None:
                self._drained = self._loop.time()
                self._read()
            self._hand_out(STREAMS_PER_PASS)
            self._rank.send_late_cancels()
            if self._batch is not None:
                self._loop.call_soon(self._drain)
            elif not self._stopped and not self._link.arm():
                self._loop.call_soon(self._drain_soon)
        except IpcError as error:
            self._on_failure(f"its link is broken: {error}")

    def _read(self) -> bool:
        """Take what the rings hold: events at once, records for `_hand_out`. False: they were empty."""
        drained = self._link.drain(RECORDS_PER_PASS)
        for error in drained.errors:
            log.error("rank %d sent an event that cannot be read: %s", self._rank.index, error)
        for event in drained.events:
            self._take(event)
        if len(drained.records):
            self._batch = Sorted(drained.records)
        return bool(drained)

    def _hand_out(self, most: int) -> None:
        """Serve so many streams of the batch, if there is one."""
        batch = self._batch
        if batch is not None:
            self._serve(batch, batch.take(most))
            if batch.done:
                self._metrics.itl.add(batch.known_gaps() * _NS)
                self._batch = None
        self._rank.made_room()

    def _serve(self, batch: Sorted, places: Sequence[Place]) -> None:
        tokens = late = 0
        for place in places:
            stream = self._rank.slots.find(place.slot, place.generation)
            if stream is None:
                late += place.end - place.start
                batch.ignore(place.start, place.end)
                continue
            end = place.end
            if not place.has_token:  # only an end comes without one
                end -= 1
                batch.ignore(end, place.end)
            if end > place.start:
                tokens += end - place.start
                batch.follow(stream.last_ns, place.start)
                if not stream.last_ns:
                    self._rank.prefilled(stream)
                stream.last_ns = batch.time(end - 1)
            if place.finish:
                self._rank.prefilled(stream)
                self._rank.slots.release(place.slot)
            stream.feed(batch.records[place.start : end], batch.ids[place.start : end], place.finish)
        self._metrics.completion_tokens.inc(tokens)
        self._metrics.late_records.inc(late)

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                self._rank.ready_with(event.facts)
                log.info("rank %d ready: %s", self._rank.index, event.facts)
            case TopLogprobs():
                stream = self._rank.slots.find(event.slot, event.generation)
                if stream is not None:
                    stream.top[event.position] = event
            case RequestError():
                self._expect_error(event)
            case Stats():
                self._rank.measured(event, time.monotonic())
            case Failed():
                self._on_failure(event.message)
            case Loaded():
                self._cache.rank_loaded(self._rank, event.facts)
            case CacheLoaded() | CacheStored() | CacheOffer():
                self._take_cached(event)

    def _take_cached(self, event: CacheLoaded | CacheStored | CacheOffer) -> None:
        cache, rank = self._cache, self._rank.index
        match event:
            case CacheLoaded():
                cache.loaded(rank, event)
            case CacheStored():
                cache.stored(rank, event)
            case CacheOffer():
                cache.offered(rank, event, self._send)

    def _send(self, command: CacheStore) -> bool:
        """Perhaps some time later, when another rank's event has let it go on."""
        with contextlib.suppress(IpcError):  # a broken link is the supervisor's to find
            return not self._stopped and self._link.send(command)
        return False

    def _expect_error(self, event: RequestError) -> None:
        stream = self._rank.slots.find(event.slot, event.generation)
        if stream is not None:
            kind = InvalidRequestError if event.client_fault else EngineRequestError
            stream.expect_error(kind(event.message))


class Place(NamedTuple):
    """Where one request's records lie in a sorted batch, and what the last of them says."""

    slot: int
    generation: int
    start: int
    end: int
    has_token: bool
    finish: Finish


class Sorted:
    """A batch sorted by request, each request's records in their order; its columns are read once."""

    def __init__(self, records: Records) -> None:
        request = records["slot"].astype(np.uint64) << np.uint64(32) | records["generation"]
        order = np.argsort(request, kind="stable")
        self.records = records[order]
        self.ids: Ids = np.ascontiguousarray(self.records["token"])
        starts = np.flatnonzero(np.diff(request[order], prepend=~request[order[0]]))
        ends = np.append(starts[1:], len(records))
        first, last = self.records[starts], self.records[ends - 1]
        columns = (
            first["slot"].tolist(), first["generation"].tolist(), starts.tolist(), ends.tolist(),
            ((last["flags"] & Flag.TOKEN) != 0).tolist(), map(_finish_of, last["finish"].tolist()),
        )  # fmt: skip
        self._places = [Place(*row) for row in zip(*columns, strict=True)]
        self._taken = 0
        self._times = self.records["time_ns"].astype(np.int64)
        self._gaps = np.diff(self._times, prepend=0)

    @property
    def done(self) -> bool:
        """Whether every request's records were taken."""
        return self._taken >= len(self._places)

    def take(self, most: int) -> Sequence[Place]:
        """The places of the next requests, at most so many."""
        start = self._taken
        self._taken += most
        return self._places[start : self._taken]

    def time(self, row: int) -> int:
        """Engine time of a row, nanoseconds."""
        return int(self._times[row])

    def follow(self, before_ns: int, row: int) -> None:
        """The token before `row` came at that time; 0: there was none."""
        self._gaps[row] = self._times[row] - before_ns if before_ns else _NO_GAP

    def ignore(self, start: int, end: int) -> None:
        """These rows say nothing about the time between tokens."""
        self._gaps[start:end] = _NO_GAP

    def known_gaps(self) -> npt.NDArray[np.int64]:
        """Nanoseconds between tokens of one request."""
        known: npt.NDArray[np.int64] = self._gaps[self._gaps != _NO_GAP]
        return known


def _finish_of(value: int) -> Finish:
    finish = _FINISH.get(value)
    if finish is None:
        raise RingCorruptError(f"a token record ends its request with {value}, which is no reason")
    return finish
