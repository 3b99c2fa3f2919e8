"""One more stream beside the load, read with a bare socket: when did each chunk arrive?

A thread of its own that only receives and looks at the clock, so that what it sees is the server's doing.
"""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise
from typing import Final

# Begins the data of every chunk with a token; the closing `[DONE]` has no brace.
MARK: Final = b"data: {"
RECEIVE_BYTES: Final = 65536
# A stream that shows nothing for so long has failed.
SILENCE_S: Final = 60.0


class Probe(threading.Thread):
    """Streams one answer after the other until `finish`."""

    def __init__(self, host: str, port: int, path: str, body: bytes) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[list[float]] = []  # per answer, the monotonic time of each chunk
        self._address = (host, port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._request = head.encode() + body
        self._ended = False
        self._failure: OSError | None = None

    def run(self) -> None:
        """The thread."""
        try:
            while not self._ended:
                self._read_one()
        except OSError as error:
            self._failure = error

    def finish(self) -> None:
        """Leave the stream it reads, and wait for the thread. Raises the OSError it ended with."""
        self._ended = True
        self.join(SILENCE_S)
        if self._failure is not None:
            raise self._failure

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between neighbouring chunks of one answer that both arrived in the window.

        Chunks that one receive brought together are 0 apart.
        """
        return [
            later - earlier
            for answer in self.arrivals
            for earlier, later in pairwise(answer)
            if start <= earlier and later <= end
        ]

    def _read_one(self) -> None:
        times: list[float] = []
        self.arrivals.append(times)
        with socket.create_connection(self._address, SILENCE_S) as connection:
            connection.sendall(self._request)
            tail = b""
            while not self._ended and (received := connection.recv(RECEIVE_BYTES)):
                now = time.monotonic()
                seen = tail + received
                times.extend([now] * seen.count(MARK))
                # A mark may be cut; shorter than the mark, so none is counted twice.
                tail = seen[1 - len(MARK) :]
