"""What no server of one thread can beat: the kernel's price for one chunk a write, paid on one core.

A bare loop of `send` on a loopback connection whose other end a child process reads: no engine, no event loop, no
JSON. When steps come at a pace, every token needs such a write of its own.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Final

SENDS: Final = 100_000
# A completion chunk of one word with its chunked-transfer frame.
CHUNK: Final = b"x" * 220
RECEIVE_BYTES: Final = 65536


def send_seconds() -> float:
    """Processor seconds of one send."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as out:
        into, _ = listener.accept()
        reader = os.fork()
        if reader == 0:
            out.close()
            while into.recv(RECEIVE_BYTES):
                pass
            os._exit(0)
        into.close()
        out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = time.process_time()
        for _ in range(SENDS):
            out.send(CHUNK)
        spent = time.process_time() - before
        out.shutdown(socket.SHUT_WR)
    os.waitpid(reader, 0)
    return spent / SENDS
