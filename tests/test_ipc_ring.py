"""Both ring implementations, in every pairing, against a plain list."""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ipc.errors import MessageTooLargeError, RingFormatError
from ipc.layout import TOKEN_BYTES, TOKEN_DTYPE
from tests.ipc_twins import HEADER, PAIRS, TWINS, set_cursors, shared_memory, twins

# Cursors count for ever: around 2^32 a 32-bit slip would show.
STARTS = st.sampled_from([0, 2**32 - 64, 2**40 + 192])


def some_records(first: int, count: int) -> npt.NDArray[np.void]:
    """Records whose every field tells its index."""
    records = np.zeros(count, TOKEN_DTYPE)
    index = np.arange(first, first + count)
    for name in TOKEN_DTYPE.names or ():
        records[name] = index % 60_000
    return records


class _RingMachine(RuleBasedStateMachine):
    """A ring in `capacity` bytes with both ends, which may be attached anew at any time."""

    writer_rings: ModuleType
    reader_rings: ModuleType
    capacity: int

    def __init__(self) -> None:
        super().__init__()
        self.shared = shared_memory(HEADER + self.capacity)
        self.memory = self.shared.__enter__()
        self.writer: Any = None
        self.reader: Any = None

    def open_writer(self) -> Any:
        raise NotImplementedError

    def open_reader(self) -> Any:
        raise NotImplementedError

    def start(self, cursor: int) -> None:
        set_cursors(self.memory, cursor)
        self.writer, self.reader = self.open_writer(), self.open_reader()

    @rule()
    def attach_writer_anew(self) -> None:
        self.writer.close()
        self.writer = self.open_writer()

    @rule()
    def attach_reader_anew(self) -> None:
        self.reader.close()
        self.reader = self.open_reader()

    def teardown(self) -> None:
        for end in (self.writer, self.reader):
            if end is not None:
                end.close()
        self.shared.__exit__(None, None, None)


class MessageMachine(_RingMachine):
    capacity = 256

    @initialize(cursor=STARTS)
    def begin(self, cursor: int) -> None:
        self.writer_rings.format_message_ring(self.memory, self.capacity)
        self.start(cursor)
        self.model: deque[bytes] = deque()

    def open_writer(self) -> Any:
        return self.writer_rings.MessageWriter(self.memory)

    def open_reader(self) -> Any:
        return self.reader_rings.MessageReader(self.memory)

    def used(self) -> int:
        return sum(8 + -(-len(message) // 8) * 8 for message in self.model)

    @rule(parts=st.lists(st.binary(max_size=100), max_size=3))
    def push(self, parts: list[bytes]) -> None:
        message = b"".join(parts)
        if len(message) > self.capacity - 8:
            with pytest.raises(MessageTooLargeError, match=str(len(message))):
                self.writer.push(*parts)
            return
        fits = self.used() + 8 + -(-len(message) // 8) * 8 <= self.capacity
        assert self.writer.push(*parts) is fits
        if fits:
            self.model.append(message)

    @rule()
    def pop(self) -> None:
        assert self.reader.pop() == (self.model.popleft() if self.model else None)

    @rule()
    def pop_all(self) -> None:
        assert self.reader.pop_all() == list(self.model)
        self.model.clear()

    @precondition(lambda self: self.writer is not None)
    @invariant()
    def both_ends_agree(self) -> None:
        assert self.writer.waiting() == self.reader.waiting() == self.used()


class TokenMachine(_RingMachine):
    records = 8
    capacity = records * TOKEN_BYTES

    @initialize(cursor=STARTS)
    def begin(self, cursor: int) -> None:
        self.writer_rings.format_token_ring(self.memory, self.records)
        self.start(cursor)
        self.pushed = self.popped = 0

    def open_writer(self) -> Any:
        return self.writer_rings.TokenWriter(self.memory)

    def open_reader(self) -> Any:
        return self.reader_rings.TokenReader(self.memory)

    @rule(count=st.integers(0, 12))
    def push(self, count: int) -> None:
        taken = self.writer.push(some_records(self.pushed, count))
        assert taken == min(count, self.records - (self.pushed - self.popped))
        self.pushed += taken

    @rule(limit=st.one_of(st.integers(0, 12), st.just(2**62)))
    def pop(self, limit: int) -> None:
        records = self.reader.pop(limit)
        assert records.dtype == TOKEN_DTYPE
        assert len(records) == min(limit, self.pushed - self.popped)
        assert records.tobytes() == some_records(self.popped, len(records)).tobytes()
        self.popped += len(records)

    @precondition(lambda self: self.writer is not None)
    @invariant()
    def both_ends_agree(self) -> None:
        assert self.writer.waiting() == self.reader.waiting() == self.pushed - self.popped


@pytest.mark.parametrize("machine", [MessageMachine, TokenMachine])
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_ring_is_a_bounded_queue(machine: type[_RingMachine], writer: str, reader: str) -> None:
    members = {"writer_rings": TWINS[writer], "reader_rings": TWINS[reader]}
    pairing = type(f"{machine.__name__}_{writer}_{reader}", (machine,), members)
    run_state_machine_as_test(pairing, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@twins
def test_popped_records_are_a_copy(rings: ModuleType) -> None:
    with shared_memory(HEADER + 8 * TOKEN_BYTES) as memory:
        rings.format_token_ring(memory, 8)
        writer, reader = rings.TokenWriter(memory), rings.TokenReader(memory)
        writer.push(some_records(0, 8))
        records = reader.pop(8)
        records["token"] = 7
        writer.push(some_records(8, 8))
        assert set(records["token"]) == {7}
        assert list(reader.pop(8)["token"]) == list(range(8, 16))
        writer.close()
        reader.close()


@twins
def test_a_message_may_fill_the_whole_ring(rings: ModuleType) -> None:
    capacity = 1 << 20  # long enough for the copies that release the GIL
    with shared_memory(HEADER + capacity) as memory:
        rings.format_message_ring(memory, capacity)
        writer, reader = rings.MessageWriter(memory), rings.MessageReader(memory)
        message = np.random.default_rng(1).bytes(capacity - 8)
        for _ in range(3):
            assert writer.push(message[:1000], memoryview(message)[1000:])
            assert not writer.push(b"")
            assert reader.pop() == message
            assert writer.push(b"x")  # the next one wraps
            assert reader.pop() == b"x"
        with pytest.raises(MessageTooLargeError, match=f"{capacity - 7} bytes cannot pass a ring of {capacity}"):
            writer.push(message, b"1")
        writer.close()
        reader.close()


@twins
def test_wrong_arguments_are_refused(rings: ModuleType) -> None:
    with shared_memory(HEADER + 8 * TOKEN_BYTES) as memory:
        rings.format_token_ring(memory, 8)
        writer, reader = rings.TokenWriter(memory), rings.TokenReader(memory)
        with pytest.raises(ValueError, match="records have 4 bytes in 1 dimensions instead of 32"):
            writer.push(np.zeros(8, np.int32))
        with pytest.raises(ValueError, match="in 2 dimensions"):
            writer.push(np.zeros((2, 2), TOKEN_DTYPE))
        with pytest.raises(OverflowError):
            reader.pop(-1)
        with pytest.raises(TypeError):
            reader.pop("3")
        assert writer.waiting() == 0
        writer.close()
        reader.close()
        with pytest.raises((TypeError, BufferError)):
            rings.TokenWriter(bytes(memory))


@twins
def test_closed_ends_raise_and_close_again(rings: ModuleType) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        writer = rings.MessageWriter(memory)
        writer.close()
        writer.close()
        for call in (writer.waiting, writer.push):
            with pytest.raises(ValueError, match="MessageWriter is closed"):
                call()


# ---- memory that is no ring ----


@twins
@pytest.mark.parametrize(
    ("index", "value", "named"),
    [
        (0, 1, "magic is 1 instead of"),
        (1, 99, "version is 99 instead of 1"),
        (2, 32, "unit is 32 instead of 8"),
        (4, 128, "capacity is 128 instead of 256"),
        (4, 255, "capacity is 255"),
        (5, 1, "capacity is"),
    ],
)
def test_attaching_checks_the_header(rings: ModuleType, index: int, value: int, named: str) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        small = memory[:HEADER].cast("I")
        small[index] = value
        small.release()
        for end in (rings.MessageWriter, rings.MessageReader):
            with pytest.raises(RingFormatError, match=named):
                end(memory)


@twins
@pytest.mark.parametrize("size", [1, HEADER - 1, HEADER, HEADER + 128, HEADER + 512])
def test_attaching_checks_the_size(rings: ModuleType, size: int) -> None:
    with shared_memory(HEADER + 1024) as memory:
        part = memory[: HEADER + 256]
        rings.format_message_ring(part, 256)
        part.release()
        part = memory[:size]
        with pytest.raises(RingFormatError):
            rings.MessageReader(part)
        part.release()


@twins
def test_formatting_checks_size_capacity_and_place(rings: ModuleType) -> None:
    with shared_memory(2048) as memory:
        for capacity in (0, 4, 255, 3 * 64, 2**32):
            with pytest.raises((RingFormatError, OverflowError)):
                rings.format_message_ring(memory[: HEADER + 256], capacity)
        with pytest.raises(RingFormatError, match="size is 639 instead of 640"):
            rings.format_message_ring(memory[: HEADER + 255], 256)
        with pytest.raises(RingFormatError, match="multiple of 128"):
            rings.format_message_ring(memory[64 : 64 + HEADER + 256], 256)
