"""One more stream beside the load, read with a bare socket: when did each chunk arrive?

A thread of its own that only receives and looks at the clock, so that what it sees is the server's doing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from itertools import pairwise
from typing import Final

from bench.streaming.server_process import ServerError
from bench.streaming.silent import request_bytes

# Begins the data of every chunk with a token; the closing `[DONE]` has no brace.
MARK: Final = b"data: {"
RECEIVE_BYTES: Final = 65536
# A stream that shows nothing for so long has failed (a loaded loop may leave it alone for many seconds).
SILENCE_S: Final = 180.0
# The thread ends as soon as its connection is shut down.
JOIN_S: Final = 10.0


class Probe(threading.Thread):
    """Streams one answer after the other until `finish`."""

    def __init__(self, host: str, port: int, path: str, body: bytes) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[list[float]] = []  # per answer, the monotonic time of each chunk
        self._address = (host, port)
        self._request = request_bytes(host, path, body)
        self._ended = False
        self._connection: socket.socket | None = None
        self._failure: OSError | None = None

    def run(self) -> None:
        """The thread."""
        try:
            while not self._ended:
                self._read_one()
        except OSError as error:
            self._failure = None if self._ended else error

    def finish(self) -> None:
        """Leave the stream it reads, and wait for the thread. Raises ServerError if it could not go on before."""
        self._ended = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it is closed already between two answers
                self._connection.shutdown(socket.SHUT_RDWR)
        self.join(JOIN_S)
        if self._failure is not None:
            raise ServerError(f"the probe's stream failed: {self._failure!r}") from self._failure

    def count(self, end: float) -> int:
        """Chunks that had arrived by then."""
        return sum(arrival <= end for answer in self.arrivals for arrival in answer)

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
            self._connection = connection
            connection.sendall(self._request)
            tail = b""
            while not self._ended and (received := connection.recv(RECEIVE_BYTES)):
                now = time.monotonic()
                seen = tail + received
                times.extend([now] * seen.count(MARK))
                # A mark may be cut; shorter than the mark, so none is counted twice.
                tail = seen[1 - len(MARK) :]
