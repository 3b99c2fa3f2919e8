"""Every message survives the wire; no bytes raise anything but CodecError."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.codec import decode_command, decode_event, encode
from ipc.errors import CodecError
from ipc.messages import (
    Cancel,
    Command,
    Event,
    Facts,
    Failed,
    Ready,
    RequestError,
    Sampling,
    Shutdown,
    Stats,
    Submit,
    TopLogprobs,
)

u32 = st.integers(0, 2**32 - 1)
reals = st.floats(allow_nan=False)
text = st.text(max_size=20)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=reals,
    top_p=reals,
    top_k=u32,
    logit_bias=st.dictionaries(u32, reals, max_size=3),
    logprobs=st.integers(-1, 20),
)
submits = st.builds(
    Submit, u32, u32, text, st.binary(max_size=100), u32, samplings, min_tokens=u32, ignore_eos=st.booleans()
)
commands: st.SearchStrategy[Command] = st.one_of(submits, st.builds(Cancel, u32, u32), st.just(Shutdown()))
facts = st.builds(
    Facts, text, text, text, text, u32, st.lists(u32, max_size=3).map(tuple), *[u32] * 5, lockstep=st.booleans()
)
tops = st.builds(TopLogprobs, u32, u32, u32, st.lists(u32).map(tuple), st.lists(reals).map(tuple))
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, facts),
    st.builds(RequestError, u32, u32, text, st.booleans()),
    tops,
    st.builds(Stats, *[u32] * 9),
    st.builds(Failed, text),
)


@given(commands)
def test_commands_round_trip(command: Command) -> None:
    assert decode_command(encode(command)) == command


@given(events)
def test_events_round_trip(event: Event) -> None:
    assert decode_event(encode(event)) == event


def test_a_prompt_of_a_million_ids_travels_in_one_piece() -> None:
    ids = np.arange(1_000_000, dtype="<i4").tobytes()
    record = encode(Submit(1, 2, "r", ids, 16, Sampling(seed=3)))
    assert len(record) < len(ids) + 300
    command = decode_command(record)
    assert isinstance(command, Submit)
    assert command.ids == ids


@given(st.one_of(commands, events))
def test_a_message_is_for_one_receiver(message: Command | Event) -> None:
    decode = decode_event if isinstance(message, Command) else decode_command
    with pytest.raises(CodecError):
        decode(encode(message))


@given(st.one_of(commands, events), st.data())
def test_a_cut_message_is_refused(message: Command | Event, data: st.DataObject) -> None:
    record = encode(message)
    decode = decode_command if isinstance(message, Command) else decode_event
    cut = data.draw(st.integers(0, len(record) - 1))
    with pytest.raises(CodecError, match=f"{cut} bytes are no"):
        decode(record[:cut])
    with pytest.raises(CodecError):
        decode(record + b"\x00")


@given(st.one_of(st.binary(max_size=60), submits.map(encode), events.map(encode)), st.data())
@settings(max_examples=300)
def test_no_bytes_raise_anything_else(record: bytes, data: st.DataObject) -> None:
    changed = bytearray(record)
    for _ in range(data.draw(st.integers(0, 3)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_command, decode_event):
        with contextlib.suppress(CodecError):
            decode(bytes(changed))


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\x01",
        b"\x81\xa4type\x63",
        b"\x81\xa4\xff\xff\xff\xff\x01",
        msgspec.msgpack.encode({"type": 2, "slot": "one", "generation": 1}),
        msgspec.msgpack.encode({"type": 20, "message": 7}),
        b"\x82\xa4type\x14\xa7message\xa2\xff\xfe",
    ],
)
def test_malformed_records_are_refused(record: bytes) -> None:
    for decode in (decode_command, decode_event):
        with pytest.raises(CodecError, match=f"^{len(record)} bytes are no (command|event): "):
            decode(record)


def test_what_has_no_byte_form_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="cannot encode a Submit: "):
        encode(Submit(1, 1, "r", b"", 1, Sampling(seed=2**64)))
    with pytest.raises(CodecError, match="cannot encode a Failed: "):
        encode(Failed("\ud800"))
    with pytest.raises(CodecError, match="cannot encode a Failed: "):
        encode(Failed(object()))  # type: ignore[arg-type]
