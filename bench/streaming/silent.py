"""A client that asks for a stream and never reads it, over a connection that holds as little as there can be."""

from __future__ import annotations

import socket
from typing import Final

# The kernel raises it to the least it allows, a few KB.
RECEIVE_BUFFER: Final = 1
CONNECT_TIMEOUT_S: Final = 60.0


def silent_client(host: str, port: int, path: str, body: bytes) -> socket.socket:
    """Its connection, with the request sent; closing it is the caller's. Raises OSError."""
    connection = socket.socket()
    try:
        # Before the connection stands: its first window is announced with it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect((host, port))
        connection.sendall(request_bytes(host, path, body))
    except OSError:
        connection.close()
        raise
    return connection


def request_bytes(host: str, path: str, body: bytes) -> bytes:
    """A request for one answer on a connection of its own."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
