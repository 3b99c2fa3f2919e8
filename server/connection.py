"""One HTTP connection: aiohttp's own, with bounds on what a client may leave unfinished.

A request head that does not end, or never begins on a new connection, is cut off, and bytes that are no HTTP get an
answer in the API's own error shape. What the kernel holds for a client that does not read is bounded too, so that
`sse.py` sees it. How bodies are bounded is `body.py`'s.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from server.errors import InternalError, outside_handlers

# Agents pause for minutes between turns; a closed connection costs them a retry.
KEEP_ALIVE_S: Final = 900.0
# From the start of a connection, or the first byte of a later request's head, to the end of that head: a client that
# trickles it, or says nothing, holds a connection and nothing more.
HEAD_TIMEOUT_S: Final = 30.0
# Left alone, the kernel takes up to 4 MiB for a client that reads nothing, minutes of a stream, and only then does a
# stall begin to show. Linux doubles the value for its own book-keeping; some 180 KB of events fit, still enough for a
# megabyte a second over a round trip of 150 ms.
SEND_BUFFER: Final = 128 * 1024


class Connection(RequestHandler):
    """aiohttp's request handler with a bound on heads and our error shape."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection that never says anything is cut off like a head that never ends."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Watch for heads that begin and do not end."""
        super().data_received(data)
        if self._current_request is None and not self._messages and self.transport is not None:
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The timer must not outlive the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = InternalError.status,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is refused like everything else. Raises ConnectionError behind a response that began."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, an error cannot be said any more")
        response = outside_handlers(status, message or str(exc)).response()
        response.force_close()
        return response

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.force_close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def serve(
    runner: web.AppRunner, listener: socket.socket, tls: ssl.SSLContext | None, backlog: int
) -> asyncio.Server:
    """Accept connections for a runner that is set up."""
    manager = runner.server
    assert manager is not None
    loop = asyncio.get_running_loop()

    def connect() -> Connection:
        return Connection(manager, loop=loop, keepalive_timeout=KEEP_ALIVE_S)

    return await loop.create_server(connect, sock=listener, ssl=tls, backlog=backlog)
