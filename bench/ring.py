"""What a decode step costs between the two processes, against multiprocessing.Queue and ZeroMQ.

Round trip: one process publishes a step of 128 token records, the other takes them and answers with one command, for
which the first waits. Both sleep whenever they have nothing to do, as in the server, so the ceiling is two wake-ups
of a sleeping process by the kernel: "pipe" is just that, one byte there and one back. The rivals carry the same
records as a list of 128 tuples, pickled; "link to tuples" makes those tuples too, "zeromq bytes" does not.
Throughput: records a second in one direction, in steps of 128; the ceiling is one copy in and one out.
Idle: processor time that a sleeping pair uses, in milliseconds a second; the ceiling is 0.

All ways take turns in one run. Fixed seed. `python -m bench.ring [--steps N] [--turns N] [--idle S]`
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Final

from bench.report import Row, report
from bench.ways import HAS_ZMQ, STEP, Link, LinkToTuples, Pipe, Queue, Way, Zmq, ZmqBytes

# Steps in one direction for each round trip, so that both parts take about as long.
BURST: Final = 4
WAYS: Final[tuple[type[Way], ...]] = (Link, LinkToTuples, Queue, Zmq, ZmqBytes, Pipe)


def cpu_seconds(pid: int) -> float:
    """Processor time of another process, by its clock (the number that clock_getcpuclockid(3) makes of a pid)."""
    return time.clock_gettime((~pid << 3) | 2)


def idle_load(link: Link, seconds: float) -> float:
    """Milliseconds of processor time a second that both processes use while both sleep."""
    before = time.process_time() + cpu_seconds(link.child_pid)
    link.engine.wait(seconds)
    return (time.process_time() + cpu_seconds(link.child_pid) - before) / seconds * 1000


def measure(ways: Sequence[Way], steps: int, turns: int) -> list[Row]:
    """One row a way, after a warm-up turn that is not counted."""
    trips: dict[str, list[float]] = {way.name: [] for way in ways}
    bursts: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(-1, turns):
        for way in ways:
            trip = way.round_trips(steps)
            burst = way.burst(steps * BURST) if way.bursts else 0.0
            if turn >= 0:
                trips[way.name].append(trip * 1e6)
                bursts[way.name].append(burst)
    ours = statistics.median(trips[Link.name])
    return [row(way, trips[way.name], bursts[way.name], ours) for way in ways]


def row(way: Way, trips: list[float], bursts: list[float], ours: float) -> dict[str, object]:
    """Figures of one way; `trips` in microseconds, `bursts` in records a second."""
    median = statistics.median(trips)
    figures: dict[str, object] = {
        "way": way.name,
        "round trip us": median,
        "best us": min(trips),
        "x link": median / ours,
    }
    if way.bursts:
        figures["records/s"] = statistics.median(bursts)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips and throughput between two processes.")
    parser.add_argument("--steps", type=int, default=1000, help="round trips a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="turns of each way (%(default)s)")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds to measure idleness (%(default)s)")
    args = parser.parse_args()
    # All children are forked before any way opens its own end and with it gets threads.
    ways = [way() for way in WAYS if HAS_ZMQ or not issubclass(way, Zmq)]
    try:
        for way in ways:
            way.open()
        rows = measure(ways, args.steps, args.turns)
        assert isinstance(ways[0], Link)
        rows[0] = {**rows[0], "idle ms/s": idle_load(ways[0], args.idle)}
    finally:
        for way in ways:
            way.close()
    if not HAS_ZMQ:
        rows += [{"way": way.name, "note": "pyzmq is not installed"} for way in (Zmq, ZmqBytes)]
    print(f"one step = {STEP} records of 32 bytes, median of {args.turns} turns of {args.steps}")
    report("ring", rows)


if __name__ == "__main__":
    main()
