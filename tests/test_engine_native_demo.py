"""The demo model's greedy text, alone and in a crowd, against `transformers`' own generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.demo import demo_folder
from engine.native.engine import NativeEngine
from ipc.messages import Submit
from tests.native_requests import NEAR_TIE, launch, run, submit

OUTPUT = 6
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


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Each prompt's tokens by generate, with the logits [n, V] they were chosen from."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    torch.set_num_threads(1)
    results = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=OUTPUT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        results.append((out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)))
    return results


def check(ours: list[int], theirs: list[int], logits: torch.Tensor, question: str) -> None:
    """Equal up to the first near tie, after which the two texts are different stories."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            gap = float(logits[index, their] - logits[index, our])
            assert gap <= NEAR_TIE, f"{question!r}, output {index}: id {our} instead of {their}, {gap} below it"
            print(f"near tie in {question!r}, output {index}: {our} for {their}, {gap:.1e} apart")
            return
    assert len(ours) == len(theirs)


def requests(prompts: list[list[int]]) -> list[Submit]:
    return [submit(slot, ids, OUTPUT) for slot, ids in enumerate(prompts)]


@pytest.mark.parametrize("together", [1, 16])
def test_greedy_text_equals_generate(
    folder: Path, prompts: list[list[int]], expected: list[tuple[list[int], torch.Tensor]], together: int
) -> None:
    engine = NativeEngine(launch(folder, num_kv_blocks=40, max_num_seqs=together, max_num_batched_tokens=100))
    outcomes = run(engine, requests(prompts))
    for slot, (theirs, logits) in enumerate(expected):
        check(outcomes[slot].tokens, theirs, logits, QUESTIONS[slot])
    assert engine.stats().blocks_used == 0
