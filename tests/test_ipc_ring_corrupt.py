"""What both ring implementations do with a ring that the other side left corrupt: refuse it, never read beyond it."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.errors import RingCorruptError
from ipc.layout import TOKEN_BYTES
from tests.ipc_twins import HEAD, HEADER, TAIL, set_cursors, shared_memory, twins

BAD_TAILS = [8 + 256 + 8, 12, 0, 2**63, 2**64 - 8]  # behind capacity, unaligned, behind head, absurd
BAD_HEADS = [32, 20, 0, 2**63, 2**64 - 8]  # ahead of the tail, unaligned, stepped back, absurd


@twins
@pytest.mark.parametrize("tail", BAD_TAILS)
def test_a_reader_refuses_a_corrupt_tail(rings: ModuleType, tail: int) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        set_cursors(memory, 8)
        reader = rings.MessageReader(memory)
        words = memory[:HEADER].cast("Q")
        words[TAIL] = tail
        for call in (reader.waiting, reader.pop, reader.pop_all, reader.pop):
            with pytest.raises(RingCorruptError, match=f"tail cursor is {tail}"):
                call()
        words[TAIL] = 8
        assert reader.pop() is None
        words.release()
        reader.close()


@twins
@pytest.mark.parametrize("head", BAD_HEADS)
def test_a_writer_refuses_a_corrupt_head(rings: ModuleType, head: int) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        set_cursors(memory, 8)
        writer = rings.MessageWriter(memory)
        assert writer.push(b"12345678")  # the tail is 24 now
        words = memory[:HEADER].cast("Q")
        words[HEAD] = head
        for call in (writer.waiting, lambda: writer.push(bytes(240))):
            with pytest.raises(RingCorruptError, match="head cursor is"):
                call()
        words.release()
        writer.close()


@twins
def test_attaching_checks_the_cursors(rings: ModuleType) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        words = memory[:HEADER].cast("Q")
        for tail, head in ((264, 0), (0, 8), (4, 0), (12, 12)):
            words[TAIL], words[HEAD] = tail, head
            for end in (rings.MessageWriter, rings.MessageReader):
                with pytest.raises(RingCorruptError):
                    end(memory)
        words.release()


@twins
@pytest.mark.parametrize(
    ("length", "guard"),
    [(9, 9 ^ 0x5AFE1E57), (2**32 - 1, (2**32 - 1) ^ 0x5AFE1E57), (8, 8), (0, 0)],
    ids=["longer than published", "absurd", "no guard", "zeros"],
)
def test_a_reader_refuses_a_corrupt_length(rings: ModuleType, length: int, guard: int) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        writer, reader = rings.MessageWriter(memory), rings.MessageReader(memory)
        writer.push(b"12345678")
        prefix = memory[HEADER : HEADER + 8].cast("I")
        prefix[0], prefix[1] = length, guard
        for call in (reader.pop, reader.pop_all):
            with pytest.raises(RingCorruptError, match=f"message length {length} "):
                call()
        prefix.release()
        writer.close()
        reader.close()


@twins
@given(data=st.binary(min_size=256, max_size=256), head=st.integers(0, 70), used=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_refused(rings: ModuleType, data: bytes, head: int, used: int) -> None:
    with shared_memory(HEADER + 256) as memory:
        rings.format_message_ring(memory, 256)
        memory[HEADER:] = data
        words = memory[:HEADER].cast("Q")
        words[HEAD], words[TAIL] = 8 * head, 8 * (head + used)
        words.release()
        try:
            reader = rings.MessageReader(memory)
        except RingCorruptError:
            assert used > 32
            return
        try:
            while (message := reader.pop()) is not None:
                assert len(message) <= 8 * used - 8
        except RingCorruptError:
            pass
        reader.close()


@twins
def test_a_token_reader_refuses_part_of_a_record(rings: ModuleType) -> None:
    with shared_memory(HEADER + 8 * TOKEN_BYTES) as memory:
        rings.format_token_ring(memory, 8)
        reader = rings.TokenReader(memory)
        words = memory[:HEADER].cast("Q")
        words[TAIL] = TOKEN_BYTES + 8
        with pytest.raises(RingCorruptError, match="not a multiple of 32"):
            reader.pop(8)
        words.release()
        reader.close()
