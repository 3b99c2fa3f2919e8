"""A client that asks for a long stream and never reads, with as little room in its kernel as there can be."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from tests.http_calls import TEXT

BODY: Final = b'{"prompt":[1],"stream":true,"max_tokens":100000}'
REQUEST: Final = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (TEXT.encode(), len(BODY), BODY)


def connect(port: int, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connection to a server of this machine; blocks for its handshake."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect(("127.0.0.1", port))
    return plain if tls is None else tls.wrap_socket(plain, server_hostname="127.0.0.1")


def stalled_client(port: int, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Its connection, with the request sent."""
    connection = connect(port, tls)
    connection.sendall(REQUEST)
    return connection
