"""Everything that `ipc` raises. Each message names the size, field or descriptor and the value found.

IpcError
|-- SegmentError            shared memory could not be made or is not what was promised
|-- RingFormatError         the memory is no ring of this version, kind and size
|-- RingCorruptError        the other process left a state that no legal history explains
|-- RingUnavailableError    no ring implementation can be used on this machine
|-- MessageTooLargeError    the message would not fit into the empty ring
|-- CodecError              a record's bytes are no message, or a message has no byte form
|-- HeartbeatError          the heartbeat block holds no known state
`-- BacklogFullError        an engine published on although it was told to stop
"""

from __future__ import annotations


class IpcError(Exception):
    """Root of this package's errors."""


class SegmentError(IpcError):
    """Shared memory could not be made or is not what was promised; names size and descriptor."""


class RingFormatError(IpcError):
    """The memory is no ring of this version, kind and size."""


class RingCorruptError(IpcError):
    """The other process left a cursor or length that no legal history explains; the link is lost."""


class RingUnavailableError(IpcError):
    """No ring implementation can be used on this machine."""


class MessageTooLargeError(IpcError):
    """The message would not fit into the empty ring, so waiting does not help."""


class CodecError(IpcError):
    """A record's bytes are no message, or a message has no byte form."""


class HeartbeatError(IpcError):
    """The heartbeat block holds no known state."""


class BacklogFullError(IpcError):
    """An engine published on although `flush` had told it to stop."""
