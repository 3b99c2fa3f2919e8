"""Messages to bytes and back: msgpack over the tagged unions of `ipc/messages.py`, never pickle.

Promises: bytes that are no message raise CodecError and nothing else, whoever wrote them. Knows nothing about rings.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ipc.errors import CodecError
from ipc.messages import Command, Event

_encoder: Final = msgspec.msgpack.Encoder()
_commands: Final = msgspec.msgpack.Decoder(Command)
_events: Final = msgspec.msgpack.Decoder(Event)

# What msgspec raises on bytes that are no msgpack, on wrong fields, on text that is no UTF-8 and on deep nesting.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: Command | Event) -> bytes:
    """The wire form of `message`. Raises CodecError, for example for an integer of more than 64 bits."""
    try:
        return _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot encode a {type(message).__name__}: {error}") from error


def decode_command(record: bytes) -> Command:
    """The command in a record of the submit ring. Raises CodecError."""
    try:
        return _commands.decode(record)
    except _DECODE_ERRORS as error:
        raise CodecError(f"{len(record)} bytes are no command: {error}") from error


def decode_event(record: bytes) -> Event:
    """The event in a record of the event ring. Raises CodecError."""
    try:
        return _events.decode(record)
    except _DECODE_ERRORS as error:
        raise CodecError(f"{len(record)} bytes are no event: {error}") from error
