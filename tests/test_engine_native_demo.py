"""The demo model's greedy text, alone and in a crowd, against `transformers`' own generate."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.demo import demo_folder
from engine.native.engine import NativeEngine
from tests.native_requests import NEAR_TIE, launch, run, submit

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about rain.",
    "What is 17 + 25?",
    "Name three primary colours.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "List the days of the week.",
    "What is the boiling point of water?",
    "Give me a synonym of happy.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "How many legs does a spider have?",
    "What is the largest ocean?",
    "Tell me a joke about cats.",
    "Summarise: the quick brown fox jumps over the lazy dog.",
    "What comes after Tuesday?",
    "Is a tomato a fruit?",
    "Recommend a book about space.",
    "Say hello in Japanese.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_folder()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]


Chosen = tuple[list[int], torch.Tensor]
"""Tokens by generate, and the logits [n, V] that they were chosen from."""


@cache
def generate(folder: Path, ids: tuple[int, ...], count: int) -> Chosen:
    """Greedy, by transformers alone."""
    out = plain_model(folder).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


@cache
def plain_model(folder: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def check(ours: list[int], theirs: list[int], logits: torch.Tensor, question: str) -> None:
    """Equal up to the first near tie, after which the two texts are different stories."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            gap = float(logits[index, their] - logits[index, our])
            assert gap <= NEAR_TIE, f"{question!r}, output {index}: id {our} instead of {their}, {gap} below it"
            print(f"near tie in {question!r}, output {index}: {our} for {their}, {gap:.1e} apart")
            return
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("together", [1, 16])
@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.soak)])
def test_greedy_text_equals_generate(folder: Path, prompts: list[list[int]], together: int, count: int) -> None:
    engine = NativeEngine(launch(folder, num_kv_blocks=40, max_num_seqs=together, max_num_batched_tokens=100))
    outcomes = run(engine, [submit(slot, ids, count) for slot, ids in enumerate(prompts)])
    for slot, ids in enumerate(prompts):
        check(outcomes[slot].tokens, *generate(folder, tuple(ids), count), QUESTIONS[slot])
    assert engine.stats().blocks_used == 0
