"""The pure-Python twin of `csrc/ring.hpp`: same bytes, same names, for tests and machines without a compiler.

Plain Python has no atomics. Each cursor is one aligned 8-byte store, which x86 keeps whole and in program order;
other processors may show a cursor before the bytes it covers, so `ipc/ring.py` does not choose this twin there.
`csrc/ring.hpp` pictures the bytes and the legal states; `ipc/_ring.pyi` documents the methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ipc.block_py import BELL_BYTES, LINE_BYTES, PULSE_BYTES, BellFlag, PulseBlock, SharedBlock, open_memory
from ipc.errors import MessageTooLargeError, RingCorruptError, RingFormatError
from ipc.layout import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BELL_BYTES",
    "HEADER_BYTES",
    "LAYOUT_VERSION",
    "LINE_BYTES",
    "MESSAGE_OVERHEAD",
    "PULSE_BYTES",
    "TOKEN_BYTES",
    "BellFlag",
    "MessageReader",
    "MessageWriter",
    "PulseBlock",
    "TokenReader",
    "TokenWriter",
    "format_message_ring",
    "format_token_ring",
]

LAYOUT_VERSION: Final = 1
HEADER_BYTES: Final = 384

_MAGIC: Final = 0x47524944
_GUARD: Final = 0x5AFE1E57
_MESSAGE_UNIT: Final = 8
MESSAGE_OVERHEAD: Final = 8
_MAX_CAPACITY: Final = 1 << 31
# Indices into the header as u64 and as u32.
_TAIL, _HEAD, _CAPACITY = 16, 32, 2
_MAGIC_AT, _VERSION_AT, _UNIT_AT = 0, 1, 2


def _legal_capacity(capacity: int, unit: int) -> bool:
    return unit <= capacity <= _MAX_CAPACITY and capacity & (capacity - 1) == 0


def _format(memory: Buffer, unit: int, capacity: int) -> None:
    # Released here, not with the last reference: an error's traceback would keep the memory from being closed.
    with open_memory(memory) as view:
        if not _legal_capacity(capacity, unit):
            raise RingFormatError(f"capacity {capacity} is no power of two between {unit} and {_MAX_CAPACITY}")
        if view.nbytes != HEADER_BYTES + capacity:
            raise RingFormatError(f"the memory's size is {view.nbytes} instead of {HEADER_BYTES + capacity}")
        view[:HEADER_BYTES] = bytes(HEADER_BYTES)
        with view[:HEADER_BYTES].cast("I") as small, view[:HEADER_BYTES].cast("Q") as words:
            small[_MAGIC_AT], small[_VERSION_AT], small[_UNIT_AT] = _MAGIC, LAYOUT_VERSION, unit
            words[_CAPACITY] = capacity


def format_token_ring(memory: Buffer, records: int, /) -> None:
    """Make `memory` (HEADER_BYTES + 32 x records bytes) an empty ring. Raises RingFormatError."""
    _format(memory, TOKEN_BYTES, records * TOKEN_BYTES)


def format_message_ring(memory: Buffer, capacity: int, /) -> None:
    """Make `memory` (HEADER_BYTES + capacity bytes) an empty ring. Raises RingFormatError."""
    _format(memory, _MESSAGE_UNIT, capacity)


class _RingEnd(SharedBlock):
    """The checked header and copies to and from the circle of data."""

    _unit: int

    def __init__(self, memory: Buffer) -> None:
        super().__init__(memory)
        if self._memory.nbytes < HEADER_BYTES:
            raise RingFormatError(f"the memory's size is {self._memory.nbytes} instead of {HEADER_BYTES}")
        # A cast view stores a whole word with one instruction; `struct.pack_into("<Q")` goes byte by byte.
        self._words = self._memory[:HEADER_BYTES].cast("Q")
        self._data = self._memory[HEADER_BYTES:]
        small = self._memory[:16].cast("I")
        wanted = {
            _MAGIC_AT: ("magic", _MAGIC),
            _VERSION_AT: ("version", LAYOUT_VERSION),
            _UNIT_AT: ("unit", self._unit),
        }
        for index, (name, value) in wanted.items():
            if small[index] != value:
                raise RingFormatError(f"{name} is {small[index]} instead of {value}")
        self._capacity = self._words[_CAPACITY]
        if not _legal_capacity(self._capacity, self._unit) or self._data.nbytes != self._capacity:
            raise RingFormatError(f"capacity is {self._capacity} instead of {self._data.nbytes}")

    def _copy_in(self, cursor: int, source: memoryview | bytes) -> None:
        at = cursor % self._capacity
        first = min(len(source), self._capacity - at)
        self._data[at : at + first] = source[:first]
        self._data[: len(source) - first] = source[first:]

    def _copy_out(self, cursor: int, size: int) -> bytearray:
        at = cursor % self._capacity
        first = min(size, self._capacity - at)
        copy = bytearray(size)
        copy[:first] = self._data[at : at + first]
        copy[first:] = self._data[: size - first]
        return copy

    def _checked(self, name: str, found: int, oldest: int, newest: int) -> int:
        if not oldest <= found <= newest or found % self._unit:
            raise RingCorruptError(
                f"{name} cursor is {found}, not a multiple of {self._unit} between {oldest} and {newest}"
            )
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._data.release()
        super().close()


class _Writer(_RingEnd):
    def __init__(self, memory: Buffer) -> None:
        super().__init__(memory)
        head, tail = self._words[_HEAD], self._words[_TAIL]
        self._head_seen = self._checked("head", head, head, head)
        self._tail = self._checked("tail", tail, head, head + self._capacity)

    def _refresh(self) -> int:
        self._head_seen = self._checked("head", self._words[_HEAD], self._head_seen, self._tail)
        return self._tail - self._head_seen

    def _space(self, wanted: int) -> int:
        known = self._capacity - (self._tail - self._head_seen)
        return known if known >= wanted else self._capacity - self._refresh()

    def _publish(self, size: int) -> None:
        self._tail += size
        self._words[_TAIL] = self._tail


class _Reader(_RingEnd):
    def __init__(self, memory: Buffer) -> None:
        super().__init__(memory)
        head, tail = self._words[_HEAD], self._words[_TAIL]
        self._head = self._checked("head", head, head, head)
        self._tail_seen = self._checked("tail", tail, head, head + self._capacity)

    def _refresh(self) -> int:
        newest = self._head + self._capacity
        self._tail_seen = self._checked("tail", self._words[_TAIL], self._tail_seen, newest)
        return self._tail_seen - self._head

    def _available(self, wanted: int) -> int:
        known = self._tail_seen - self._head
        return known if known >= wanted else self._refresh()

    def _consume(self, size: int) -> None:
        self._head += size
        self._words[_HEAD] = self._head


class TokenWriter(_Writer):
    """The writing end of a token ring."""

    _unit = TOKEN_BYTES

    def push(self, records: npt.NDArray[np.void], /) -> int:
        """Publish as many of these `[n]` TOKEN_DTYPE records as fit, at once; returns how many."""
        self.check_open()
        if records.ndim != 1 or records.itemsize != TOKEN_BYTES:
            raise ValueError(
                f"records have {records.itemsize} bytes in {records.ndim} dimensions instead of {TOKEN_BYTES} in one"
            )
        wanted = min(len(records) * TOKEN_BYTES, self._capacity)
        taken = min(wanted, self._space(wanted))
        if taken:
            self._copy_in(self._tail, records.view(np.uint8).data[:taken])
            self._publish(taken)
        return taken // TOKEN_BYTES

    def waiting(self) -> int:
        """Records published and not yet popped."""
        self.check_open()
        return self._refresh() // TOKEN_BYTES


class TokenReader(_Reader):
    """The reading end of a token ring."""

    _unit = TOKEN_BYTES

    def pop(self, limit: int, /) -> npt.NDArray[np.void]:
        """A copy of the oldest records, at most `limit`, as `[n]` TOKEN_DTYPE. Raises RingCorruptError."""
        self.check_open()
        if limit < 0:
            raise OverflowError(f"limit {limit} is negative")
        wanted = min(limit * TOKEN_BYTES, self._capacity)
        size = min(wanted, self._available(wanted))
        records = np.frombuffer(self._copy_out(self._head, size), TOKEN_DTYPE)
        self._consume(size)
        return records

    def waiting(self) -> int:
        """Records published and not yet popped."""
        self.check_open()
        return self._refresh() // TOKEN_BYTES


def _footprint(length: int) -> int:
    return MESSAGE_OVERHEAD + -(-length // _MESSAGE_UNIT) * _MESSAGE_UNIT


class MessageWriter(_Writer):
    """The writing end of a message ring."""

    _unit = _MESSAGE_UNIT

    def push(self, *parts: Buffer) -> bool:
        """Publish one message of these joined parts; False: no room now. Raises MessageTooLargeError."""
        self.check_open()
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(view.nbytes for view in views)
        if length > self._capacity - MESSAGE_OVERHEAD:
            raise MessageTooLargeError(f"a message of {length} bytes cannot pass a ring of {self._capacity}")
        if self._space(_footprint(length)) < _footprint(length):
            return False
        self._copy_in(self._tail, np.array([length, length ^ _GUARD], np.uint32).tobytes())
        at = self._tail + MESSAGE_OVERHEAD
        for view in views:
            self._copy_in(at, view)
            at += view.nbytes
        self._publish(_footprint(length))
        return True

    def waiting(self) -> int:
        """Bytes published and not yet popped, lengths and padding included."""
        self.check_open()
        return self._refresh()


class MessageReader(_Reader):
    """The reading end of a message ring."""

    _unit = _MESSAGE_UNIT

    def pop(self) -> bytes | None:
        """The oldest message; None: the ring is empty. Raises RingCorruptError."""
        self.check_open()
        here = self._available(MESSAGE_OVERHEAD)
        if here == 0:
            return None
        length, guard = memoryview(self._copy_out(self._head, MESSAGE_OVERHEAD)).cast("I")
        if length ^ guard != _GUARD or _footprint(length) > here:
            raise RingCorruptError(f"message length {length} (guard {guard}) with {here} bytes published")
        message = bytes(self._copy_out(self._head + MESSAGE_OVERHEAD, length))
        self._consume(_footprint(length))
        return message

    def pop_all(self) -> list[bytes]:
        """All messages published before the call, oldest first. Raises RingCorruptError."""
        self.check_open()
        # What is published from here on waits for the next call, or a busy writer could hold us here for ever.
        end = self._head + self._refresh()
        messages = []
        while self._head != end and (message := self.pop()) is not None:
            messages.append(message)
        return messages

    def waiting(self) -> int:
        """Bytes published and not yet popped, lengths and padding included."""
        self.check_open()
        return self._refresh()
