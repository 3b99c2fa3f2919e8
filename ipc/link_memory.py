"""The one segment of a link, cut into its parts. Both sides compute the same offsets from the constants here.

byte    0  u32 magic, u32 version, u64 size   written by the server before the engine starts
      128  pulse block                        written by the engine
      256  bell of the engine                 `sleeping`, see csrc/ring.hpp
      384  bell of the server
     4096  submit ring                        server -> engine, messages
           event ring                         engine -> server, messages
           token ring                         engine -> server, 32-byte records
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from ipc.errors import RingFormatError
from ipc.layout import TOKEN_BYTES
from ipc.ring import BELL_BYTES, HEADER_BYTES, PULSE_BYTES, format_message_ring, format_token_ring
from ipc.segment import Segment

# A prompt of a million ids is 4 MB in one piece; this holds sixteen of them while the engine is in a long step.
SUBMIT_BYTES: Final = 64 << 20
# One step of 128 requests with 20 top log-probabilities each is about 60 kB: a hundred such steps.
EVENT_BYTES: Final = 8 << 20
# 512 steps of 128 requests: what an engine makes while the server's loop is stuck for seconds.
TOKEN_RECORDS: Final = 65_536

_PAGE: Final = 4096
_MAGIC: Final = 0x4B4C4944  # "DILK" in memory
_VERSION: Final = 1
_HEADER: Final = struct.Struct("=IIQ")
_PULSE_AT: Final = 128
_ENGINE_BELL_AT: Final = 256
_SERVER_BELL_AT: Final = 384


def _after(offset: int, size: int) -> int:
    """The first page border behind a part."""
    return -(-(offset + size) // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Capacities of one link's rings; each a power of two."""

    submit_bytes: int = SUBMIT_BYTES
    event_bytes: int = EVENT_BYTES
    token_records: int = TOKEN_RECORDS

    @property
    def submit_at(self) -> int:
        return _PAGE

    @property
    def event_at(self) -> int:
        return _after(self.submit_at, HEADER_BYTES + self.submit_bytes)

    @property
    def token_at(self) -> int:
        return _after(self.event_at, HEADER_BYTES + self.event_bytes)

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return _after(self.token_at, HEADER_BYTES + self.token_records * TOKEN_BYTES)


class LinkMemory:
    """One link's segment, formatted and checked, with a view of each part."""

    def __init__(self, segment: Segment, shape: LinkShape) -> None:
        memory = segment.memory
        self.segment = segment
        self.pulse = memory[_PULSE_AT : _PULSE_AT + PULSE_BYTES]
        self.engine_bell = memory[_ENGINE_BELL_AT : _ENGINE_BELL_AT + BELL_BYTES]
        self.server_bell = memory[_SERVER_BELL_AT : _SERVER_BELL_AT + BELL_BYTES]
        self.submit = memory[shape.submit_at : shape.submit_at + HEADER_BYTES + shape.submit_bytes]
        self.event = memory[shape.event_at : shape.event_at + HEADER_BYTES + shape.event_bytes]
        self.token = memory[shape.token_at : shape.token_at + HEADER_BYTES + shape.token_records * TOKEN_BYTES]

    @classmethod
    def create(cls, shape: LinkShape) -> LinkMemory:
        """A new segment with empty rings. Raises SegmentError or RingFormatError."""
        segment = Segment.create(shape.size, "deepinfer-link")
        parts = cls(segment, shape)
        try:
            format_message_ring(parts.submit, shape.submit_bytes)
            format_message_ring(parts.event, shape.event_bytes)
            format_token_ring(parts.token, shape.token_records)
        except RingFormatError:
            parts.close()
            raise
        _HEADER.pack_into(segment.memory, 0, _MAGIC, _VERSION, shape.size)
        return parts

    @classmethod
    def attach(cls, fd: int, shape: LinkShape) -> LinkMemory:
        """The segment that `create` made in another process. Raises SegmentError or RingFormatError."""
        segment = Segment.attach(fd, shape.size)
        found = _HEADER.unpack_from(segment.memory, 0)
        wanted = (_MAGIC, _VERSION, shape.size)
        if found != wanted:
            segment.close()
            raise RingFormatError(f"the link at fd {fd} starts with (magic, version, size) {found} instead of {wanted}")
        return cls(segment, shape)

    def close(self) -> None:
        """Unmap. The rings and blocks on the views must be closed before."""
        for view in (self.pulse, self.engine_bell, self.server_bell, self.submit, self.event, self.token):
            view.release()
        self.segment.close()
