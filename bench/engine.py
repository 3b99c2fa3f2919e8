"""The native engine against plain transformers with its DynamicCache: same weights, type, threads, ids.

prefill: tokens a second of one prompt, from its arrival to its first output token. decode: output tokens a second of
a batch whose contexts are 256 tokens at the start. Both sides choose greedily. The engine also schedules, keeps pages
and writes records; transformers only runs its model, on a batch of equal lengths, which is the best case for it. The
ceiling at batch 1 is memory: each output token reads all weights once.

Sides take turns in one run and the best turn of each counts. Fixed seed.
`python -m bench.engine [--model DIR] [--threads N] [--turns N] [--steps N]`
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from bench.report import Row, report
from engine.demo import demo_folder
from engine.native.engine import NativeEngine
from ipc.messages import Launch, LinkFds, Sampling, Submit

PROMPTS: Final = (512, 2048)
BATCHES: Final = (1, 8, 32)
CONTEXT: Final = 256
NUM_BLOCKS: Final = 128  # 32 sequences of four blocks

Ids = npt.NDArray[np.int32]


class Ours:
    """The native engine, driven as the engine loop drives it."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        launch = Launch(
            rank=0,
            world=1,
            engine="native",
            model=model,
            link=LinkFds(-1, -1, -1),
            parent_pid=os.getpid(),
            dtype=dtype,
            device="cpu",
            threads=threads,
            num_kv_blocks=NUM_BLOCKS,
        )
        self._engine = NativeEngine(launch)
        self.vocab_size = self._engine.facts.vocab_size

    def prefill(self, ids: Ids) -> float:
        """Seconds to the first token of one prompt [1, n]."""
        start = time.perf_counter()
        self._add(ids, 1)
        self._run()
        return time.perf_counter() - start

    def decode(self, ids: Ids, steps: int) -> float:
        """Seconds for `steps` tokens of each prompt [B, n], once all of them decode."""
        self._add(ids, ids.size + steps)  # none ends before: prompts take turns, and the first ones decode meanwhile
        begun: set[int] = set()
        while len(begun) < len(ids):
            begun.update(self._engine.step().records["slot"].tolist())
        start = time.perf_counter()
        for _ in range(steps):
            self._engine.step()
        seconds = time.perf_counter() - start
        for slot in range(len(ids)):
            self._engine.cancel(slot, 1)
        return seconds

    def _add(self, ids: Ids, max_tokens: int) -> None:
        sampling = Sampling(seed=0, temperature=0)
        for slot, row in enumerate(ids):
            prompt = row.astype("<i4").tobytes()
            self._engine.add(Submit(slot, 1, f"{slot}", prompt, max_tokens, sampling, ignore_eos=True))

    def _run(self) -> None:
        while self._engine.has_work():
            self._engine.step()


class Theirs:
    """transformers' model with its own attention and DynamicCache."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )

    @torch.inference_mode()
    def prefill(self, ids: Ids) -> float:
        """Seconds to the first token of one prompt [1, n]."""
        start = time.perf_counter()
        self._first(ids)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, ids: Ids, steps: int) -> float:
        """Seconds for `steps` tokens after each prompt [B, n]."""
        tokens, cache = self._first(ids)
        start = time.perf_counter()
        for _ in range(steps):
            out = self._model(tokens, cache=cache, use_cache=True)
            tokens = out.logits.argmax(-1)
        return time.perf_counter() - start

    def _first(self, ids: Ids) -> tuple[torch.Tensor, Any]:
        out = self._model(torch.from_numpy(ids.astype(np.int64)), use_cache=True, logits_to_keep=1)
        return out.logits.argmax(-1), out.cache


def compare(case: str, tokens: int, turns: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Row:
    """Both sides by turns; tokens a second of the best turn of each."""
    times = [(ours(), theirs()) for _ in range(turns)]
    native, plain = (tokens / min(side) for side in zip(*times, strict=True))
    return {"case": case, "native tok/s": native, "transformers tok/s": plain, "ratio": native / plain}


def measure(model: str, dtype: str, threads: int, turns: int, steps: int) -> list[Row]:
    """All cases."""
    ours, theirs = Ours(model, dtype, threads), Theirs(model, dtype)
    random = np.random.default_rng(0)

    def prompts(batch: int, length: int) -> Ids:
        return random.integers(0, ours.vocab_size, size=(batch, length), dtype=np.int32)

    rows: list[Row] = []
    for length in PROMPTS:
        ids = prompts(1, length)
        prefills = (lambda ids=ids: ours.prefill(ids)), (lambda ids=ids: theirs.prefill(ids))
        rows.append(compare(f"prefill {length}", length, turns, *prefills))
    for batch in BATCHES:
        ids = prompts(batch, CONTEXT)
        decodes = (lambda ids=ids: ours.decode(ids, steps)), (lambda ids=ids: theirs.decode(ids, steps))
        rows.append(compare(f"decode batch {batch}", batch * steps, turns, *decodes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine")
    parser.add_argument("--model", default=None, help="model folder (default: the demo model)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="output tokens of a decode case")
    options = parser.parse_args()
    model = options.model or str(demo_folder())
    report("engine", measure(model, options.dtype, options.threads, options.turns, options.steps))


if __name__ == "__main__":
    main()
