"""What clients that never read cost the others: gaps of good streams alone, then beside 50 such clients.

The fake engine at a step of 10 ms, so each stream is some 20 KB a second. 64 good streams are read by wrk and one more
by a bare socket, whose gaps between chunks are shown; a bad client has the least room that its kernel gives it and
takes nothing, until the server cuts it off (`server/sse.py`). `cut_s` is from the first bad request to the last cut:
the time to fill the kernel's buffers and the server's, then the server's patience, 30 s.

Memory is the server's resident set: at the end of the first phase, and the most seen during the second. What the
kernel holds for bad clients is not in it, and is bounded apart (`server/connection.py`).

Ceiling: gaps of one step, in both phases, and all bad clients cut off.

    python -m bench.stalled [--good N] [--stalled N] [--step-ms MS] [--window S] [--limit S]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.report import Row, report
from bench.streaming.model import MAX_MODEL_LEN, write_model
from bench.streaming.probe import Probe
from bench.streaming.reading import quantile
from bench.streaming.server_process import ServerError, ServerProcess, resident_bytes
from bench.streaming.silent import silent_client
from bench.streaming.wrk import INSTALL, LoadError, Wrk

PATH: Final = "/v1/completions"
PROMPT: Final = list(range(16))
# The median answer of public agent traces.
GOOD_TOKENS: Final = 616
# As long as the model allows: longer than any buffer.
BAD_TOKENS: Final = MAX_MODEL_LEN - len(PROMPT) - 1
STALLED: Final = "deepinfer:stalled_readers_total"
# From the first connection until all streams are in step with each other.
RAMP_S: Final = 1.0
# How exactly a cut is seen: often enough for a figure in seconds, too rarely to be load.
POLL_S: Final = 0.5
MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run; one option each."""

    good: int
    stalled: int
    step_ms: float
    window_s: float
    limit_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when a run failed or a bad client was not cut off, 2 when wrk is missing."""
    plan = _plan(argv)
    if shutil.which("wrk") is None:
        print(INSTALL, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            report("stalled", _run(plan, Path(folder)))
    except (LoadError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _plan(argv: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m bench.stalled", description="Clients that never read.")
    parser.add_argument("--good", type=int, default=64, help="streams that are read")
    parser.add_argument("--stalled", type=int, default=50, help="streams that nobody reads")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step")
    parser.add_argument("--window", type=float, default=15.0, help="measured seconds without bad clients")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds within which all must be cut off")
    args = parser.parse_args(argv)
    for name in ("good", "stalled", "step_ms", "window", "limit"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not above 0")
    return Plan(args.good, args.stalled, args.step_ms, args.window, args.limit)


def _run(plan: Plan, folder: Path) -> list[Row]:
    """Both phases over one server."""
    seats = plan.good + plan.stalled + 1  # the probe's
    argv = [sys.executable, "-m", "server", "--engine", "fake", "--model", str(write_model(folder / "words"))]
    argv += ["--port", "0", "--max-num-seqs", str(seats), "--shutdown-timeout", "1", "--log-interval-steps", "0"]
    with ServerProcess(argv, {"DEEPINFER_FAKE_STEP_MS": str(plan.step_ms)}, folder / "log") as server:
        server.wait_ready()
        with _good_streams(plan, server) as probe:
            time.sleep(RAMP_S)
            start = time.monotonic()
            time.sleep(plan.window_s)
            alone = _row("alone", probe, start, resident_bytes(server.pid))
            start = time.monotonic()
            most = _cut_off(plan, server)
            cut = {"stalled_readers": int(server.counter(STALLED)), "cut_s": time.monotonic() - start}
            return [alone, {**_row(f"beside {plan.stalled}", probe, start, most), **cut}]


@contextlib.contextmanager
def _good_streams(plan: Plan, server: ServerProcess) -> Iterator[Probe]:
    """Streams that are read, and the probe that shows how evenly. Raises LoadError and ServerError."""
    body = _body(GOOD_TOKENS)
    probe = Probe(server.host, server.port, PATH, body)
    with Wrk(f"http://{server.host}:{server.port}{PATH}", body, plan.good) as wrk:
        probe.start()
        yield probe
        wrk.stop()
    probe.finish()


def _cut_off(plan: Plan, server: ServerProcess) -> int:
    """Open the bad clients and wait until all are cut off; returns the most memory seen. Raises ServerError."""
    deadline = time.monotonic() + plan.limit_s
    with contextlib.ExitStack() as opened:
        for _ in range(plan.stalled):
            opened.enter_context(silent_client(server.host, server.port, PATH, _body(BAD_TOKENS)))
        most = resident_bytes(server.pid)
        while (cut := server.counter(STALLED)) < plan.stalled:
            if time.monotonic() > deadline:
                raise ServerError(f"{cut:.0f} of {plan.stalled} silent clients were cut off in {plan.limit_s:g} s")
            time.sleep(POLL_S)
            most = max(most, resident_bytes(server.pid))
    return most


def _body(max_tokens: int) -> bytes:
    request = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return msgspec.json.encode(request)


def _row(phase: str, probe: Probe, start: float, resident: int) -> dict[str, object]:
    """What a phase that ends now was for the probe's stream."""
    end = time.monotonic()
    gaps = probe.gaps(start, end)
    return {
        "phase": phase,
        "seconds": end - start,
        "gap_p50_ms": 1e3 * quantile(gaps, 0.5),
        "gap_p99_ms": 1e3 * quantile(gaps, 0.99),
        "gap_max_ms": 1e3 * quantile(gaps, 1),
        "rss_mb": resident / MB,
    }


if __name__ == "__main__":
    sys.exit(main())
