"""Step 11: server-sent events on one response.

The response is opened by the first write, so a failure before the first token still has its own status. After
that an error can only be an event.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from server.errors import ApiError

DONE: Final = b"data: [DONE]\n\n"

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx would otherwise gather events before it passes them on.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Writes events in order; several producers may share it."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._opening = asyncio.Lock()

    @property
    def opened(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send complete events. Raises ConnectionResetError when the client is gone."""
        if not self.opened:
            async with self._opening:
                if not self.opened:
                    await self.response.prepare(self._request)
        await self.response.write(events)

    async def fail(self, error: ApiError) -> None:
        """The last event of a stream that cannot go on."""
        await self.write(event(error.body()) + DONE)


def event(data: bytes) -> bytes:
    """One event around a JSON document (JSON has no raw line breaks)."""
    return b"data: " + data + b"\n\n"
