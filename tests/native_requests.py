"""Helpers of the native engine's tests: launches, requests and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.native.batch import Batch
from engine.native.engine import NativeEngine
from ipc.messages import Event, Finish, Flag, Launch, LinkFds, RequestError, Sampling, Submit, TopLogprobs
from tests import tiny_models

# A token that is not the plain model's first choice passes only if the two logits are this close.
NEAR_TIE = 1e-4

GREEDY = Sampling(seed=0, temperature=0)


def launch(folder: Path, **changes: Any) -> Launch:
    """One rank on one CPU thread."""
    settings: dict[str, Any] = {"num_kv_blocks": 16, "threads": 1, "device": "cpu", **changes}
    return Launch(
        rank=0, world=1, engine="native", model=str(folder), link=LinkFds(-1, -1, -1), parent_pid=0, **settings
    )


def submit(slot: int, ids: Sequence[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **changes: Any) -> Submit:
    """A request of generation 1."""
    return Submit(
        slot=slot,
        generation=1,
        request_id=f"r{slot}",
        ids=np.array(ids, dtype="<i4").tobytes(),
        max_tokens=max_tokens,
        sampling=sampling,
        **changes,
    )


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of ordinary ids with these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(3, tiny_models.VOCABULARY, size=length).tolist() for length in lengths]


def random_lengths(count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths from 1 to `longest`."""
    lengths: list[int] = np.random.default_rng(seed).integers(1, longest, size=count, endpoint=True).tolist()
    return lengths


@dataclass
class Outcome:
    """Everything an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    tops: list[TopLogprobs] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)


def run(engine: NativeEngine, requests: Sequence[Submit] = (), every: int = 0) -> dict[int, Outcome]:
    """Add the requests (one each `every` steps, 0: all at once), step to the end, sort the records by slot."""
    outcomes: dict[int, Outcome] = {}
    waiting = list(requests)
    step = 0
    while waiting or engine.has_work():
        while waiting and (every == 0 or step % every == 0):
            engine.add(waiting.pop(0))
            if every:
                break
        collect(engine, outcomes)
        step += 1
    return outcomes


def collect(engine: NativeEngine, outcomes: dict[int, Outcome]) -> None:
    """One step."""
    output = engine.step()
    for event in output.events:
        _note(event, outcomes)
    for record in output.records:
        outcome = outcomes.setdefault(int(record["slot"]), Outcome())
        assert outcome.finish is Finish.NONE, "a record after the end"
        outcome.finish = Finish(int(record["finish"]))
        if Flag(int(record["flags"])) & Flag.TOKEN:
            outcome.tokens.append(int(record["token"]))
            outcome.logprobs.append(float(record["logprob"]))
            outcome.positions.append(int(record["position"]))


def _note(event: Event, outcomes: dict[int, Outcome]) -> None:
    if isinstance(event, TopLogprobs):
        outcomes.setdefault(event.slot, Outcome()).tops.append(event)
    elif isinstance(event, RequestError):
        outcomes.setdefault(event.slot, Outcome()).errors.append(event)


Seen = dict[tuple[int, int], torch.Tensor]
"""Logits by (slot, position of the token they decide)."""


def recorder(seen: Seen) -> Callable[[Batch, torch.Tensor], None]:
    """An observer that keeps every step's logits."""

    def observe(batch: Batch, logits: torch.Tensor) -> None:
        for sequence, row in zip(batch.sampled, logits, strict=True):
            seen[sequence.slot, sequence.length] = row.clone()

    return observe


def near_ties(tokens: Sequence[int], logits: torch.Tensor) -> list[str]:
    """Where greedy `tokens` differ from the best of `logits` [len(tokens), V]; asserts that each is a near tie."""
    found = []
    for index, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        best = int(row.argmax())
        if token != best:
            gap = float(row[best] - row[token])
            assert gap <= NEAR_TIE, f"output {index}: id {token} instead of {best}, {gap} below it"
            found.append(f"output {index}: {token} for {best}, {gap:.1e} apart")
    return found
