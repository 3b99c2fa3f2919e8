"""What answers while the tokenizer is being loaded: `/live` that we live, everything else that we are not ready.

Without it clients would hang in the listen queue for seconds, and a probe would give up on a server that is well.
Answers end their connection, so that none is left when the real application takes over the socket.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from server.connection import Connection
from server.errors import NotReadyError, health_response

# Answers are written at once: this is for clients that are slow to take them.
FAREWELL_S: Final = 0.5


@asynccontextmanager
async def starting(listener: socket.socket, tls: ssl.SSLContext | None, backlog: int) -> AsyncIterator[None]:
    """Answer on the listener within the block; it stays open behind it."""
    loop = asyncio.get_running_loop()
    manager = web.Server(_answer, access_log=None)
    # A descriptor of its own, because a server that is closed closes what it was given.
    server = await loop.create_server(
        lambda: Connection(manager, loop=loop), sock=listener.dup(), ssl=tls, backlog=backlog
    )
    try:
        yield
    finally:
        server.close()
        await manager.shutdown(FAREWELL_S)


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    match request.path:
        case "/live":
            response = health_response({"status": "ok"}, ready=True)
        case "/health":
            response = health_response({"status": "loading"}, ready=False)
        case _:
            response = NotReadyError("the server is starting: its tokenizer is being loaded").response()
    response.headers["X-Request-ID"] = secrets.token_hex(16)  # as on every answer
    response.force_close()
    return response
