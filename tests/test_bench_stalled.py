"""The bench of clients that never read: it says so when one is not cut off, its silent client is one, and it runs."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys

import psutil
import pytest

from bench.streaming.server_process import ROOT, resident_bytes
from bench.streaming.silent import silent_client

NEEDS_WRK = pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
SMALL = ("--good", "2", "--stalled", "2", "--window", "0.5")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/stalled.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)


def test_a_silent_client_asks_and_leaves_its_kernel_little_room() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        with silent_client(host, port, "/here", b"{}"):
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(4096).startswith(b"POST /here HTTP/1.1\r\n")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                connection.setblocking(False)
                sent = 0
                while select.select([], [connection], [], 0.2)[1]:
                    sent += connection.send(bytes(1024))
    assert sent < 32 * 1024


def test_resident_bytes_are_those_of_that_process() -> None:
    assert abs(resident_bytes(os.getpid()) - psutil.Process().memory_info().rss) < 10**7
    assert resident_bytes(2**22 + 1) == 0  # above the largest pid there can be


def test_a_plan_without_a_bad_client_is_refused() -> None:
    done = bench("--stalled", "0")
    assert done.returncode == 2
    assert "--stalled 0 is not above 0" in done.stderr


@NEEDS_WRK
def test_a_client_that_is_not_cut_off_in_time_fails_the_bench() -> None:
    done = bench(*SMALL, "--limit", "1")
    assert done.returncode == 1
    assert done.stderr.strip() == "0 of 2 silent clients were cut off in 1 s"


@pytest.mark.soak
@NEEDS_WRK
def test_all_are_cut_off_and_both_phases_measured() -> None:
    done = bench(*SMALL, "--step-ms", "2")
    assert done.returncode == 0, done.stderr
    alone, beside = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (alone["phase"], beside["phase"], beside["stalled_readers"]) == ("alone", "beside 2", 2)
    assert all(row["gap_p50_ms"] > 1 and row["rss_mb"] > 10 for row in (alone, beside))
