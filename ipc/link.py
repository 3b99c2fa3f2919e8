"""One rank's link: one shared segment and two eventfds between the server process and one engine process.

Promises: commands arrive in order and whole; an event published before a token record is delivered before it, through
a full ring too; nobody blocks on a full ring and nobody polls. Each end is used by one thread. A link lives as long as
its engine process: a restarted engine gets a new one. Knows nothing about slots, requests or processes.

The server's turn, after `create` and after each time `fileno` is readable:

    link.acknowledge()
    while True:
        drained = link.drain(4096)  # deliver drained.events first, then drained.records
        if link.arm():
            break                   # nothing came meanwhile: the engine will ring

The engine's turn:

    for command in link.receive(64): ...
    if link.flush(): link.publish(records, events)  # of one step
    if nothing to do, or not flushed: link.wait(1.0)
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.backlog import Backlog
from ipc.codec import decode_command, decode_event, encode
from ipc.doorbell import Doorbell, create_eventfd
from ipc.errors import CodecError, SegmentError
from ipc.heartbeat import Beat, EngineState, HeartbeatReader, HeartbeatWriter
from ipc.link_memory import LinkMemory, LinkShape
from ipc.messages import Command, Event, LinkFds
from ipc.ring import MessageReader, MessageWriter, TokenReader, TokenWriter

DEFAULT_SHAPE: Final = LinkShape()
# The server rings for commands, not for room it made; an engine with a backlog looks again that often.
CONGESTED_WAIT_S: Final = 0.002


class Drained(msgspec.Struct, frozen=True):
    """What one `drain` brought. Deliver the events before the records. (A struct: made at every turn of the loop.)"""

    records: npt.NDArray[np.void]  # [n] TOKEN_DTYPE, a copy
    events: list[Event]
    errors: list[CodecError] = []  # one for each event record that was no event

    def __bool__(self) -> bool:
        return len(self.records) > 0 or bool(self.events) or bool(self.errors)


@dataclass(frozen=True, slots=True)
class RingDepth:
    """What waits in each ring at this moment."""

    submit_bytes: int
    event_bytes: int
    records: int


class ServerLink:
    """The server's end; owns the segment and both eventfds."""

    def __init__(self, memory: LinkMemory, to_engine: Doorbell, to_server: Doorbell) -> None:
        self._memory = memory
        self._to_engine = to_engine
        self._to_server = to_server
        self._submit = MessageWriter(memory.submit)
        self._event = MessageReader(memory.event)
        self._token = TokenReader(memory.token)
        self._heartbeat = HeartbeatReader(memory.pulse)
        self._closed = False
        self.fds = LinkFds(memory.segment.fd, to_engine.fileno(), to_server.fileno())

    @classmethod
    def create(cls, shape: LinkShape = DEFAULT_SHAPE) -> ServerLink:
        """A new link with empty rings. Raises SegmentError or RingFormatError."""
        memory = LinkMemory.create(shape)
        bells: list[Doorbell] = []
        try:
            bells += [Doorbell(memory.engine_bell, create_eventfd())]
            bells += [Doorbell(memory.server_bell, create_eventfd())]
        except SegmentError:
            _close_all(*bells, memory)
            raise
        return cls(memory, *bells)

    def send(self, command: Command) -> bool:
        """Publish a command and wake the engine; False: the ring is full, nothing was written.

        Raises CodecError, MessageTooLargeError for more than the ring could ever hold, RingCorruptError.
        """
        if not self._submit.push(encode(command)):
            return False
        self._to_engine.ring()
        return True

    def drain(self, limit: int) -> Drained:
        """At most `limit` records, and all events published before them (and maybe some after).

        Raises RingCorruptError. An event record that cannot be decoded is among `errors` and costs no other.
        """
        # Records first: the events that precede them are then certainly in their ring.
        records = self._token.pop(limit)
        drained = Drained(records, [])
        for record in self._event.pop_all():
            try:
                drained.events.append(decode_event(record))
            except CodecError as error:
                drained.errors.append(error)
        return drained

    def fileno(self) -> int:
        """The descriptor for the event loop: readable once the engine rang."""
        return self._to_server.fileno()

    def arm(self) -> bool:
        """Prepare to sleep. True: nothing waits, the engine will ring; False: drain again. Raises RingCorruptError."""
        self._to_server.prepare_sleep()
        if self._token.waiting() or self._event.waiting():
            self._to_server.cancel_sleep()
            return False
        return True

    def acknowledge(self) -> None:
        """Make `fileno` unreadable until the next ring. Never blocks."""
        self._to_server.acknowledge()

    def beat(self) -> Beat:
        """The engine's last sign of life. Raises HeartbeatError."""
        return self._heartbeat.beat()

    def depth(self) -> RingDepth:
        """What waits in the rings. Raises RingCorruptError."""
        return RingDepth(self._submit.waiting(), self._event.waiting(), self._token.waiting())

    def close(self) -> None:
        """Unmap and close the descriptors; an engine that still has them keeps the memory. Twice is once."""
        if self._closed:
            return
        self._closed = True
        parts = (self._submit, self._event, self._token, self._heartbeat)
        _close_all(*parts, self._to_engine, self._to_server, self._memory)


class EngineLink:
    """The engine's end. Duplicates the descriptors, so closing it takes nothing from another end in this process."""

    def __init__(self, memory: LinkMemory, shape: LinkShape, to_engine: Doorbell, to_server: Doorbell) -> None:
        self._memory = memory
        self._to_engine = to_engine
        self._to_server = to_server
        self._submit = MessageReader(memory.submit)
        self._event = MessageWriter(memory.event)
        self._token = TokenWriter(memory.token)
        self._heartbeat = HeartbeatWriter(memory.pulse)
        self._backlog = Backlog(self._event, shape.event_bytes, self._token)
        self._bad_command: CodecError | None = None
        self._rung = False
        self._poll = select.poll()
        self._poll.register(to_engine.fileno(), select.POLLIN)
        self._closed = False

    @classmethod
    def attach(cls, fds: LinkFds, shape: LinkShape = DEFAULT_SHAPE) -> EngineLink:
        """The link behind inherited descriptors. Raises SegmentError, RingFormatError or RingCorruptError."""
        memory = LinkMemory.attach(fds.segment, shape)
        bells: list[Doorbell] = []
        try:
            bells += [Doorbell(memory.engine_bell, _own_copy(fds.to_engine))]
            bells += [Doorbell(memory.server_bell, _own_copy(fds.to_server))]
        except SegmentError:
            _close_all(*bells, memory)
            raise
        return cls(memory, shape, *bells)

    def receive(self, limit: int) -> list[Command]:
        """The oldest commands, at most `limit`.

        Raises RingCorruptError, and CodecError for a record that is no command: the ones before it came with an
        earlier call, the ones behind it come with the next.
        """
        if self._bad_command is not None:
            error, self._bad_command = self._bad_command, None
            raise error
        commands: list[Command] = []
        while len(commands) < limit and (record := self._submit.pop()) is not None:
            try:
                commands.append(decode_command(record))
            except CodecError as error:
                if not commands:
                    raise
                self._bad_command = error
                break
        return commands

    def publish(self, records: npt.NDArray[np.void], events: Sequence[Event]) -> None:
        """Publish events, then `[n]` TOKEN_DTYPE records, and wake the server; what does not fit waits for `flush`.

        Raises CodecError, MessageTooLargeError or BacklogFullError, all before anything is published, and
        RingCorruptError.
        """
        self._backlog.publish(records, [encode(event) for event in events])
        self._to_server.ring()

    def flush(self) -> bool:
        """Publish what waits. False: the server does not keep up, the caller must not step. Raises RingCorruptError."""
        if not self._backlog:
            return True
        flushed = self._backlog.flush()
        self._to_server.ring()
        return flushed

    def wait(self, timeout_s: float) -> None:
        """Sleep until the server rings or the time is over; returns at once if a command is there. Never spins.

        With a backlog it sleeps CONGESTED_WAIT_S at most. May end early, for the bell of a command that was received
        without it. Raises RingCorruptError.
        """
        if self._backlog:
            timeout_s = min(timeout_s, CONGESTED_WAIT_S)
        if self._rung:
            # Only now, because after waking up the command comes first.
            self._to_engine.acknowledge()
            self._rung = False
        self._to_engine.prepare_sleep()
        if not self._submit.waiting() and self._bad_command is None:
            self._rung = bool(self._poll.poll(timeout_s * 1000))
        self._to_engine.cancel_sleep()

    def beat(self, step: int, state: EngineState) -> None:
        """Say that the engine lives, on every pass of its loop and before a long step."""
        self._heartbeat.beat(step, state)

    def close(self) -> None:
        """Unmap and close the duplicated descriptors; what waits is lost. Twice is once."""
        if self._closed:
            return
        self._closed = True
        parts = (self._submit, self._event, self._token, self._heartbeat)
        _close_all(*parts, self._to_engine, self._to_server, self._memory)


def _own_copy(fd: int) -> int:
    """A close-on-exec duplicate; the inherited one no longer passes to programs that the engine starts."""
    try:
        os.set_inheritable(fd, False)
        return os.dup(fd)
    except OSError as error:
        raise SegmentError(f"cannot use the inherited fd {fd}: {error}") from error


_Closable = MessageReader | MessageWriter | TokenReader | TokenWriter | HeartbeatReader | HeartbeatWriter | Doorbell


def _close_all(*parts: _Closable | LinkMemory) -> None:
    for part in parts:
        part.close()
