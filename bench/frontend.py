"""How many tokens a second one HTTP process streams when the engine costs nearly nothing, and how evenly.

Our server and a baseline of the usual shape (FastAPI on uvicorn, a queue per request, pickled steps, two decodes a
token) over the same fake engine, in turns, each in fresh processes. wrk keeps N streams open; tokens are counted by
the servers, processor time by the kernel, both over the same window. One more stream, read by a bare socket, shows the
gaps between chunks; it is not one of the N.

flat-out: the engine steps as fast as it can; here tokens_s counts. A gap then says little: chunks come in bunches.
          The baseline's loop first writes all that is queued, so it is deaf for seconds: its lag is beyond the scale.
paced:    a step takes 10 ms; here gaps and processor time per token count, and tokens_s should be N / step.

Figures are medians over the rounds; lag_p99_ms is pooled, read from buckets, and 1000 means that or more. A gap of
nan: no two chunks reached the one more stream within a window.

Ceiling: one core. 1e6 / server_us is what the HTTP process alone could stream; the row `send` is the bare kernel
price of one write a token. Where engine, client and server share too few cores, tokens_s is below that, for both.

    python -m bench.frontend [--streams N ...] [--regimes NAME ...] [--rounds N] [--window S]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.report import report
from bench.streaming.ceiling import send_seconds
from bench.streaming.model import write_model
from bench.streaming.probe import Probe
from bench.streaming.reading import Reading, summary
from bench.streaming.server_process import ServerError, ServerProcess
from bench.streaming.wrk import INSTALL, LoadError, Wrk

PATH: Final = "/v1/completions"
OURS: Final = "ours"
BASELINE: Final = "baseline"
COMMANDS: Final = {
    # Prompts here fill no page to reuse; a small pool starts faster than one of all that memory allows.
    OURS: (
        "server",
        "--engine",
        "fake",
        "--shutdown-timeout",
        "1",
        "--log-interval-steps",
        "0",
        "--hicache-size-gb",
        "0.1",
    ),
    BASELINE: ("bench.baselines.fastapi_server",),
}
REGIMES: Final = ("flat-out", "paced")
PROMPT: Final = list(range(16))
# From the first connection until all streams are in step with each other.
RAMP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run; one option each."""

    streams: Sequence[int]
    regimes: Sequence[str]
    rounds: int
    window_s: float
    step_ms: float
    max_tokens: int

    @property
    def body(self) -> bytes:
        """The request of every stream."""
        request = {"prompt": PROMPT, "max_tokens": self.max_tokens, "stream": True, "ignore_eos": True}
        return msgspec.json.encode(request)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when a run failed, 2 when wrk is missing."""
    plan = _plan(argv)
    if shutil.which("wrk") is None:
        print(INSTALL, file=sys.stderr)
        return 2
    send_us = 1e6 * send_seconds()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder) / "words")
            rows = [row for regime in plan.regimes for row in _regime_rows(plan, regime, model)]
    except (LoadError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    ceiling = {"regime": "ceiling", "streams": 1, "server": "send", "tokens_s": 1e6 / send_us, "server_us": send_us}
    report("frontend", [*rows, ceiling])
    return 0


def _plan(argv: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m bench.frontend", description="Tokens a second over HTTP.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256], help="open streams, one run each")
    parser.add_argument("--regimes", nargs="+", default=REGIMES, choices=REGIMES, help="pace of the engine")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server")
    parser.add_argument("--window", type=float, default=3.0, help="measured seconds of a run")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a paced step")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer")
    args = parser.parse_args(argv)
    for name in ("rounds", "window", "max_tokens"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is not above 0")
    if min(args.streams) < 1:
        parser.error(f"--streams {min(args.streams)} is not above 0")
    return Plan(args.streams, args.regimes, args.rounds, args.window, args.step_ms, args.max_tokens)


def _regime_rows(plan: Plan, regime: str, model: Path) -> Iterator[dict[str, object]]:
    """Both servers in turns, then a row for each server and stream count."""
    readings: dict[tuple[int, str], list[Reading]] = {}
    for turn in range(plan.rounds):
        for name in COMMANDS:
            log = model.parent / f"{regime}-{turn}-{name}.log"
            for streams, reading in _turn(plan, regime, name, model, log):
                print(f"{regime} {name} {streams}: {reading.tokens / reading.seconds:,.0f} tokens/s", file=sys.stderr)
                readings.setdefault((streams, name), []).append(reading)
    for streams in plan.streams:
        ours, baseline = (summary(readings[streams, name]) for name in (OURS, BASELINE))
        head = {"regime": regime, "streams": streams}
        ratios = {
            "tokens_ratio": _ratio(ours["tokens_s"], baseline["tokens_s"]),
            "cpu_ratio": _ratio(baseline["server_us"], ours["server_us"]),
        }
        yield {**head, "server": BASELINE, **baseline}
        yield {**head, "server": OURS, **ours, **ratios}


def _turn(plan: Plan, regime: str, name: str, model: Path, log: Path) -> Iterator[tuple[int, Reading]]:
    """One server in a fresh process, through all stream counts."""
    seats = max(plan.streams) + 1  # the probe's
    argv = [sys.executable, "-m", *COMMANDS[name], "--model", str(model), "--port", "0", "--max-num-seqs", str(seats)]
    step_ms = plan.step_ms if regime == "paced" else 0
    with ServerProcess(argv, {"DEEPINFER_FAKE_STEP_MS": str(step_ms)}, log) as server:
        server.wait_ready()
        for streams in plan.streams:
            yield streams, _measure(plan, server, streams)


def _measure(plan: Plan, server: ServerProcess, streams: int) -> Reading:
    """One window with so many streams; the server is idle before and after."""
    url = f"http://{server.host}:{server.port}{PATH}"
    before = server.sample()
    probe = Probe(server.host, server.port, PATH, plan.body)
    with Wrk(url, plan.body, streams) as wrk:
        probe.start()
        time.sleep(RAMP_S)
        start = server.sample()
        time.sleep(plan.window_s)
        end = server.sample()
        # At once: what a server still writes to clients that have left must not count as streamed.
        seen = wrk.stop().bytes
    tokens = end.tokens - before.tokens - probe.count(end.time)
    probe.finish()
    server.settle()
    return Reading.between(start, end, probe.gaps(start.time, end.time), seen / tokens if tokens else math.nan)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.nan


if __name__ == "__main__":
    sys.exit(main())
