"""Each architecture through the engine, against transformers' plain forward in float32, logit by logit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.native.cpu_kernels import VARIABLE
from engine.native.engine import NativeEngine
from tests import tiny_models
from tests.native_requests import Seen, launch, near_ties, random_lengths, random_prompts, recorder, run, submit

TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture(scope="module", params=sorted(tiny_models.FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return tiny_models.write(family, tmp_path_factory.mktemp(family))


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs on the native kernels and on their torch twins."""
    monkeypatch.setenv(VARIABLE, request.param)


def check(folder: Path, prompts: list[list[int]], seen: Seen, outputs: dict[int, list[int]]) -> None:
    model = tiny_models.plain(folder)
    for slot, prompt in enumerate(prompts):
        tokens = outputs[slot]
        logits = tiny_models.plain_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack([seen[slot, len(prompt) + index] for index in range(len(tokens))])
        assert (ours - logits).abs().max() <= TOLERANCE * logits.abs().max()
        for tie in near_ties(tokens, logits):
            print(f"near tie, request {slot}, {tie}")


@pytest.mark.parametrize("budget", [4096, 61])
def test_logits_and_greedy_tokens_equal_the_plain_forward(folder: Path, budget: int) -> None:
    """Prompts up to three blocks long, whole or in small chunks, joining a running batch."""
    prompts = random_prompts(random_lengths(6, 370, seed=budget), seed=budget)
    seen: Seen = {}
    engine = NativeEngine(launch(folder, num_kv_blocks=32, max_num_batched_tokens=budget), recorder(seen))
    outcomes = run(engine, [submit(slot, ids, 24, ignore_eos=True) for slot, ids in enumerate(prompts)], every=2)
    assert {len(outcome.tokens) for outcome in outcomes.values()} == {24}
    check(folder, prompts, seen, {slot: outcome.tokens for slot, outcome in outcomes.items()})


def test_a_preempted_request_gives_the_same_tokens(folder: Path) -> None:
    """Three prompts that all outgrow a block while only two more are left: the last one is computed twice."""
    prompts = random_prompts([120, 124, 121, 250], seed=1)
    seen: Seen = {}
    engine = NativeEngine(launch(folder, num_kv_blocks=5, max_num_batched_tokens=150), recorder(seen))
    outcomes = run(engine, [submit(slot, ids, 24, ignore_eos=True) for slot, ids in enumerate(prompts)])
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.blocks_used == 0
    assert {len(outcome.tokens) for outcome in outcomes.values()} == {24}
    check(folder, prompts, seen, {slot: outcome.tokens for slot, outcome in outcomes.items()})
