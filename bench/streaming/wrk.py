"""HTTP load from `wrk`: N connections that stream one completion after the other, until it is told to stop.

wrk is C on one thread, so it takes far less of the machine than any Python client would; it parses the chunks and
throws them away.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final, Self

import msgspec

INSTALL: Final = "wrk was not found; it is a Debian package: apt-get install wrk"
SCRIPT: Final = Path(__file__).with_name("stream.lua")
# wrk counts an answer that takes longer as an error; a stream takes seconds on a loaded server.
ANSWER_TIMEOUT_S: Final = 600
# Ends by itself after so long, should nobody stop it.
LIMIT_S: Final = 600
# Told to stop, it only has to add up.
GRACE_S: Final = 30.0


class LoadError(RuntimeError):
    """wrk failed, or the server refused or broke what it asked."""


class Totals(msgspec.Struct, frozen=True):
    """Whole requests and all bytes of a run, as the client saw them."""

    requests: int
    bytes: int
    refused: int
    broken: int


class Wrk:
    """A running wrk. Use in a `with` block: it is killed if the block is left early."""

    def __init__(self, url: str, body: bytes, connections: int) -> None:
        program = shutil.which("wrk")
        if program is None:
            raise LoadError(INSTALL)
        options = ("-t1", f"-c{connections}", f"-d{LIMIT_S}s", f"--timeout={ANSWER_TIMEOUT_S}s")
        self._popen = subprocess.Popen(  # noqa: S603 - the program found above
            [program, *options, "-s", str(SCRIPT), url, "--", body.decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.communicate()

    def stop(self) -> Totals:
        """Have it hang up on all its streams. Raises LoadError, also if it had ended before."""
        ended = self._popen.poll() is not None
        self._popen.send_signal(signal.SIGINT)
        output, _ = self._popen.communicate(timeout=GRACE_S)
        line = next((line for line in output.splitlines() if line.startswith("totals ")), None)
        if ended or line is None:
            raise LoadError(f"wrk ended with {self._popen.returncode}: {output.strip()}")
        totals = msgspec.json.decode(line.removeprefix("totals "), type=Totals)
        if totals.refused or totals.broken:
            raise LoadError(f"the server refused {totals.refused} requests and broke {totals.broken}")
        return totals
