"""Time to first token and time per output token over input length x batch, straight on an engine, without HTTP.

A batch of prompts of equal length arrives at once, and every one gets `--output-len` tokens. TTFT is the time from that
arrival to a request's first token, so it includes waiting for the batch's other prompts; TPOT is the time between a
request's tokens after it. What a server adds to both is its frontend's share. The ceiling of TTFT is arithmetic, that
of TPOT at batch 1 is memory: each token reads all weights.

Prompts are random ids, none of them twice, so no prefix is ever found. Fixed seed; one run a cell, after a warm-up.
`python -m bench.offline_matrix [--engine native|fake] [--input-lens N ...] [--batches N ...]`
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.report import Row, report
from engine.demo import demo_folder
from engine.protocol import Engine
from ipc.messages import Launch, LinkFds, Sampling, Submit

ENGINES: Final = ("native", "fake")
BLOCK_TOKENS: Final = 128
# Of the first run, which pays for memory that no later one asks for.
WARM_UP_TOKENS: Final = 64
MIN_OUTPUT: Final = 2  # a time between tokens needs two of them

Ids = npt.NDArray[np.int32]


class MatrixError(ValueError):
    """These cells cannot be measured; the message names flags and values."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is measured: every input length with every batch, in tokens and requests."""

    input_lens: tuple[int, ...]
    batches: tuple[int, ...]
    output_len: int

    def __post_init__(self) -> None:
        """Raises MatrixError."""
        for flag, values, least in (
            ("--input-lens", self.input_lens, 1),
            ("--batches", self.batches, 1),
            ("--output-len", (self.output_len,), MIN_OUTPUT),
        ):
            if min(values) < least:
                raise MatrixError(f"{flag} {min(values)} is below {least}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.input_lens) + self.output_len

    @property
    def blocks(self) -> int:
        """KV blocks of the largest cell, so that none is preempted."""
        return max(self.batches) * -(-self.longest // BLOCK_TOKENS)


@dataclass(slots=True)
class Times:
    """When one request's tokens came, in seconds since its arrival."""

    tokens: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.tokens[0]

    @property
    def between(self) -> float:
        """Mean time per output token after the first."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


def start(engine: str, model: str, dtype: str, threads: int, matrix: Matrix) -> Engine:
    """An engine with room for the largest cell. Raises MatrixError when its context is too short."""
    launch = Launch(
        rank=0,
        world=1,
        engine=engine,
        model=model,
        link=LinkFds(-1, -1, -1),
        parent_pid=os.getpid(),
        dtype=dtype,
        threads=threads,
        max_num_seqs=max(matrix.batches),
        num_kv_blocks=matrix.blocks,
    )
    made = _build(launch)
    if matrix.longest > made.facts.max_model_len:
        raise MatrixError(
            f"--input-lens {max(matrix.input_lens)} and --output-len {matrix.output_len} exceed "
            f"the model's context of {made.facts.max_model_len}"
        )
    return made


def _build(launch: Launch) -> Engine:
    # Imported late: torch takes seconds, and the fake does not need it.
    if launch.engine == "fake":
        from engine.fake import FakeEngine

        return FakeEngine(launch)
    from engine.native.engine import NativeEngine

    return NativeEngine(launch)


def measure(engine: Engine, matrix: Matrix) -> list[Row]:
    """One row a cell."""
    random = np.random.default_rng(0)

    def prompts(length: int, batch: int) -> Ids:
        return random.integers(0, engine.facts.vocab_size, size=(batch, length), dtype=np.int32)

    run(engine, prompts(min(WARM_UP_TOKENS, *matrix.input_lens), 1), MIN_OUTPUT)
    return [
        _row(length, run(engine, prompts(length, batch), matrix.output_len))
        for length in matrix.input_lens
        for batch in matrix.batches
    ]


def run(engine: Engine, prompts: Ids, output_len: int) -> list[Times]:
    """Answer prompts [B, n], all at once; the times of each."""
    sampling = Sampling(seed=0, temperature=0)
    times = [Times() for _ in prompts]
    began = time.perf_counter()
    for slot, ids in enumerate(prompts):
        engine.add(Submit(slot, 1, f"{slot}", ids.astype("<i4").tobytes(), output_len, sampling, ignore_eos=True))
    while engine.has_work():
        records = engine.step().records
        now = time.perf_counter() - began
        for slot in records["slot"].tolist():
            times[slot].tokens.append(now)
    return times


def _row(length: int, times: Sequence[Times]) -> Row:
    firsts, betweens = [one.first for one in times], [one.between for one in times]
    end = max(one.tokens[-1] for one in times)
    return {
        "input": length,
        "batch": len(times),
        "TTFT p50 ms": float(np.median(firsts)) * 1000,
        "TTFT max ms": max(firsts) * 1000,
        "TPOT p50 ms": float(np.median(betweens)) * 1000,
        "TPOT max ms": max(betweens) * 1000,
        "input tok/s": len(times) * length / max(firsts),
        "output tok/s": sum(len(one.tokens) for one in times) / end,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 2 when the flags do not fit each other or the model."""
    parser = argparse.ArgumentParser(prog="python -m bench.offline_matrix", description="TTFT and TPOT without HTTP.")
    parser.add_argument("--model", default=None, help="model folder (default: the demo model)")
    parser.add_argument("--engine", default="native", choices=ENGINES)
    parser.add_argument("--dtype", default="auto", help="as the server's flag")
    parser.add_argument("--input-lens", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="prompts at once")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the native engine")
    given = parser.parse_args(argv)
    try:
        matrix = Matrix(tuple(given.input_lens), tuple(given.batches), given.output_len)
        engine = start(given.engine, given.model or str(demo_folder()), given.dtype, given.threads, matrix)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        report("offline_matrix", measure(engine, matrix))
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
