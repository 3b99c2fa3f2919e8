"""A real server for tests: `python -m server` with fake engines, as child processes of the test.

Promises that leaving the `with` block ends the server in an orderly way and fails the test where anything of it is
left. Waits for conditions, never for times.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT: Final = Path(__file__).resolve().parents[1]
# Far above what anything here takes: a test that gets there has found a hang.
DEADLINE_S: Final = 30.0
POLL_S: Final = 0.02
# Host memory of a test server's prefix cache: some thousand pages of the fake engine.
POOL_GB: Final = "0.004"


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fail naming it at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(POLL_S)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody collected has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class RunningServer:
    """Started and ready inside its `with` block. `flags` follow `--engine fake --model MODEL --port 0`."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        end_by: int = signal.SIGTERM,
        program: str = "server",
    ) -> None:
        self.address = ""
        self.seen: set[int] = set()
        self._end_by = end_by
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        self.process = start(["--model", str(model), *flags], environ, self._log.fileno(), program)

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and self.process.poll() is None:
                self._end()
        finally:
            self._abandon()

    @property
    def pid(self) -> int:
        """The server process."""
        return self.process.pid

    def log(self) -> str:
        """What the server and its ranks wrote so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text(encoding="utf-8", errors="replace")

    def rank_pid(self, rank: int) -> int:
        """The process that runs as this rank now."""
        return int(re.findall(rf"rank {rank} started as process (\d+)", self.log())[-1])

    def family(self) -> set[int]:
        """All processes of the server, itself included, that run now."""
        root = psutil.Process(self.pid)
        return {root.pid, *(child.pid for child in root.children(recursive=True))}

    def terminate(self) -> int:
        """SIGTERM and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=DEADLINE_S) as answer:
                return answer.status, msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, msgspec.json.decode(error.read())

    def metric(self, name: str, prefix: str = "deepinfer", **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 for one that never counted."""
        with urllib.request.urlopen(f"{self.address}/deepinfer/metrics", timeout=DEADLINE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = (sample for family in families for sample in family.samples if sample.name == f"{prefix}:{name}")
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def wait_idle(self) -> None:
        """Until no rank holds a request, a block or a slot, nor a page for one; the numbers are the ranks' own."""
        names = ("slots_used", "num_requests_running", "num_requests_waiting", "kv_blocks_used")
        for name in names:
            eventually(lambda name=name: self.metric(name) == 0, f"{name} is 0")  # type: ignore[misc]
        eventually(lambda: self.metric("inflight", "deepinfer_hicache") == 0, "all plans are answered")

    def wait_healthy(self) -> None:
        """Until every rank takes requests."""
        eventually(lambda: self.get("/health")[0] == 200, "all ranks are ready")

    def _wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.match(r"ready: (\S+) ", line):
                self.address = match[1]
                return
        raise AssertionError(f"the server ended with status {self.process.wait()} before it was ready:\n{self.log()}")

    def _end(self) -> None:
        self.seen |= self.family()
        assert not _names(self.seen), "what has a name outlives a crash"
        self.process.send_signal(self._end_by)
        assert self.process.wait(DEADLINE_S) == 0, self.log()
        # The server collects its ranks before it ends, so not even a zombie may be left.
        left = [pid for pid in self.seen if psutil.pid_exists(pid)]
        assert not left, f"processes {left} outlived the server:\n{self.log()}"

    def _abandon(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


def start(
    flags: Sequence[str], environ: Mapping[str, str] | None, log: int, program: str = "server"
) -> subprocess.Popen[str]:
    """`python -m server` with fake engines on a free port, its log going to a descriptor."""
    command = [sys.executable, "-m", program, "--engine", "fake", "--port", "0", "--hicache-size-gb", POOL_GB, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(environ or {})}, stdout=subprocess.PIPE, stderr=log, text=True
    )


def _names(pids: set[int]) -> list[str]:
    """Files of /dev/shm and sockets in the file system that the processes hold."""
    found = []
    for pid in pids:
        links = [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]
        found += [target for link in links if (target := _target(link)).startswith("/dev/shm/")]
        found += [str(one.laddr) for one in psutil.Process(pid).net_connections("unix") if one.laddr]
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # a connection that was closed since it was listed
        return ""
