"""A server under measurement: a fresh process on a free loopback port, its counters and its processor time.

Any server fits that prints `ready: http://HOST:PORT` and answers `/deepinfer/metrics` in Prometheus text. Its children
(the engine) are accounted apart from it. Ended by pid when the `with` block is left.
"""

from __future__ import annotations

import http.client
import os
import re
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
# A loop that first writes all that is queued (hundreds of streams, each to its end) answers a scrape many seconds
# late; one that takes this long is stuck.
SCRAPE_TIMEOUT_S: Final = 180.0
# After the load left: the tokens of its last requests stop coming within this time.
SETTLE_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
QUIET_S: Final = 0.3  # no token for so long: nothing runs; longer than any pace measured here
LOG_TAIL_CHARS: Final = 2000

ROOT: Final = Path(__file__).resolve().parents[2]
_READY: Final = re.compile(r"^ready: http://([\d.]+):(\d+)", re.MULTILINE)
_TOKENS: Final = re.compile(r"^deepinfer:completion_tokens_total (\S+)$", re.MULTILINE)
_LAG: Final = re.compile(r'^deepinfer:loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


class ServerError(RuntimeError):
    """The server did not start, or does not answer as expected; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's state at one moment: counts since its start, seconds of processor time."""

    time: float
    tokens: float
    lag: Mapping[float, float]  # upper bound in seconds -> observations up to it
    server_cpu: float
    engine_cpu: float


class ServerProcess:
    """Started by `__init__`, usable after `wait_ready`."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        self.host, self.port = "", 0
        self._connection: http.client.HTTPConnection | None = None
        with log.open("wb") as output:
            self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                argv, cwd=ROOT, env=os.environ | environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._popen.terminate()
        try:
            self._popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self._popen.pid

    def wait_ready(self) -> None:
        """Until it prints its address. Raises ServerError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := _READY.search(self._output())) is None:
            if self._popen.poll() is not None or time.monotonic() >= deadline:
                raise ServerError(f"no server came up:\n{self._output()[-LOG_TAIL_CHARS:]}")
            time.sleep(POLL_S)
        self.host, self.port = found[1], int(found[2])
        # Kept open: a loaded loop would take another long turn to accept a new one.
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=SCRAPE_TIMEOUT_S)

    def sample(self) -> Sample:
        """Counters, and the times of the moment their answer came: it is written in the turn that reads them.

        Raises ServerError.
        """
        text = self._scrape()
        tokens = _TOKENS.search(text)
        lag = {float(bound): float(count) for bound, count in _LAG.findall(text)}
        if tokens is None or not lag:
            raise ServerError(f"the server's metrics lack its tokens or its loop lag:\n{text[:LOG_TAIL_CHARS]}")
        engine_cpu = sum(map(cpu_seconds, children(self.pid)))
        return Sample(time.monotonic(), float(tokens[1]), lag, cpu_seconds(self.pid), engine_cpu)

    def settle(self) -> Sample:
        """Wait until no tokens come any more. Raises ServerError."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        last = self.sample()
        while time.monotonic() < deadline:
            time.sleep(QUIET_S)
            now = self.sample()
            if now.tokens == last.tokens:
                return now
            last = now
        raise ServerError("the server still produces tokens after its clients left")

    def counter(self, name: str) -> float:
        """A metric without labels; 0 where the server has none of that name. Raises ServerError."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self._scrape(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def _scrape(self) -> str:
        assert self._connection is not None
        try:
            self._connection.request("GET", "/deepinfer/metrics")
            return self._connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            tail = self._output()[-LOG_TAIL_CHARS:]
            raise ServerError(f"the server does not answer ({error!r}):\n{tail}") from error

    def _output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond; 0 when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the number that clock_getcpuclockid(3) makes of a pid
    except OSError:
        return 0.0


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in main memory; 0 when it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * resource.getpagesize()


def children(pid: int) -> list[int]:
    """Processes whose parent this is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name, in parentheses, may hold anything; behind it: state, parent, ...
            parent = path.read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found
