"""Step 11: server-sent events on one response, written straight to its transport.

The response is opened by the first event, or by a comment that keeps the connection alive while nothing comes; a
failure before that still has its own status, later it can only be an event. A reader that takes nothing any more is
cut off after STALL_TIMEOUT_S, and until then costs at most HIGH_WATER of buffered bytes and what one batch adds, beside
what the kernel holds (`connection.SEND_BUFFER`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from types import TracebackType
from typing import Final, Self

from aiohttp import HttpVersion11, web

from server.errors import ApiError

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"

# Proxies and clients give a silent connection up after 30 to 60 s.
KEEP_ALIVE_S: Final = 10.0
# Written and not yet taken by the kernel: some hundred events. Above it tokens wait as 32-byte records instead.
HIGH_WATER: Final = 64 * 1024
LOW_WATER: Final = 16 * 1024
# Without any progress for that long a reader is not slow but gone.
STALL_TIMEOUT_S: Final = 30.0
# How often a stalled reader is looked at; nothing tells us when the kernel took some bytes.
DRAIN_POLL_S: Final = 0.05
# SO_LINGER, on and for no time: what the kernel still holds for the client is dropped when the connection is closed.
_NO_LINGER: Final = struct.pack("ii", 1, 0)

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx would otherwise gather events before it passes them on.
    "X-Accel-Buffering": "no",
}


class ReaderGoneError(ConnectionError):
    """The client closed the connection."""


class ReaderStalledError(ConnectionError):
    """The client keeps the connection and reads nothing; it has been cut off."""


class EventStream:
    """Writes events in order; several producers may share it. Use it as a context manager."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._opening = asyncio.Lock()
        self._chunked = request.version >= HttpVersion11
        self._last_write = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._tick)
        self._comment: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    @property
    def opened(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    @property
    def flowing(self) -> bool:
        """Whether the reader keeps up."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() <= HIGH_WATER

    async def open(self) -> None:
        """Send status and headers, once. Raises ReaderGoneError."""
        async with self._opening:
            if not self.opened:
                if self._chunked:
                    self.response.enable_chunked_encoding()
                await self.response.prepare(self._request)

    def send(self, events: bytes) -> bool:
        """Write complete events on an opened stream. False: let the reader take some (`drain`) before the next ones."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return False
        if events:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
            self._last_write = time.monotonic()
        return transport.get_write_buffer_size() <= HIGH_WATER

    async def write(self, events: bytes) -> None:
        """Open if need be, send, and wait for a slow reader. Raises ReaderGoneError and ReaderStalledError."""
        if not self.opened:
            await self.open()
        if not self.send(events):
            await self.drain()

    async def drain(self) -> None:
        """Wait until the reader has taken most of it. Raises ReaderGoneError and ReaderStalledError."""
        waiting, since = None, time.monotonic()
        while True:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ReaderGoneError("the client closed the connection")
            size = transport.get_write_buffer_size()
            if size <= LOW_WATER:
                return
            if waiting is None or size < waiting:
                waiting, since = size, time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT_S:
                _reset(transport)
                raise ReaderStalledError(f"the client took nothing of {size} bytes for {STALL_TIMEOUT_S:.0f} s")
            await asyncio.sleep(DRAIN_POLL_S)

    async def fail(self, error: ApiError) -> None:
        """The last event of a stream that cannot go on."""
        await self.write(event(error.body()) + DONE)

    def _tick(self) -> None:
        idle = time.monotonic() - self._last_write
        if idle >= KEEP_ALIVE_S:
            self._comment = self._loop.create_task(self._send_comment())
            idle = 0.0
        self._timer = self._loop.call_later(KEEP_ALIVE_S - idle, self._tick)

    async def _send_comment(self) -> None:
        if not self.opened:
            await self.open()
        self.send(COMMENT)


def event(data: bytes) -> bytes:
    """One event around a JSON document (JSON has no raw line breaks)."""
    return b"data: " + data + b"\n\n"


def _reset(transport: asyncio.Transport) -> None:
    """End a connection whose client reads nothing. After a mere close the kernel would go on offering it the rest."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
