"""The native engine as a whole over a tiny Llama: requests in every phase, refusals, ends, seeds and statistics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.native.engine import NativeEngine
from engine.native.sequence import BLOCK_SIZE
from engine.protocol import Engine, RequestRefusedError
from ipc.messages import Finish, Flag, Sampling
from tests import tiny_models
from tests.native_requests import GREEDY, Outcome, collect, launch, random_prompts, run, submit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


def engine_of(folder: Path, **changes: Any) -> NativeEngine:
    return NativeEngine(launch(folder, **changes))


def first_greedy_token(folder: Path, prompt: list[int]) -> int:
    return run(engine_of(folder), [submit(0, prompt, 1)])[0].tokens[0]


def test_facts(folder: Path) -> None:
    engine: Engine = engine_of(folder, max_model_len=500, max_num_seqs=3)
    facts = engine.facts
    assert (facts.engine, facts.model_type, facts.dtype, facts.device) == ("native", "llama", "float32", "cpu")
    assert (facts.vocab_size, facts.eos_ids) == (tiny_models.VOCABULARY, (tiny_models.EOS,))
    assert (facts.max_model_len, facts.max_num_seqs, facts.num_blocks) == (500, 3, 16)
    assert (facts.block_size, facts.page_bytes) == (BLOCK_SIZE, 3 * 2 * BLOCK_SIZE * 2 * 16 * 4)
    assert (facts.keep_tokens, facts.lockstep) == (1, False)
    assert engine_of(folder, max_model_len=10**6).facts.max_model_len == tiny_models.CONTEXT


def test_the_layout_digest_tells_apart_what_pages_mean(folder: Path, tmp_path: Path) -> None:
    digest = engine_of(folder).facts.layout_digest
    assert engine_of(folder, num_kv_blocks=3).facts.layout_digest == digest
    other = tiny_models.write("llama", tmp_path / "heads", num_key_value_heads=1)
    assert engine_of(other).facts.layout_digest != digest
    assert engine_of(folder, dtype="bfloat16").facts.layout_digest != digest


def test_records_count_positions_from_the_prompt_on(folder: Path) -> None:
    outcome = run(engine_of(folder), [submit(4, [5, 6, 7], 6, ignore_eos=True)])[4]
    assert outcome.positions == [3, 4, 5, 6, 7, 8]
    assert outcome.finish is Finish.LENGTH
    assert outcome.logprobs == [0.0] * 6


def test_an_end_of_sequence_id_stops_and_is_flagged(folder: Path) -> None:
    force = Sampling(seed=0, temperature=0, logit_bias={tiny_models.EOS: 1000})
    engine = engine_of(folder)
    engine.add(submit(0, [5, 6], 9, force))
    (record,) = engine.step().records
    assert (record["token"], record["finish"]) == (tiny_models.EOS, Finish.STOP)
    assert Flag(int(record["flags"])) == Flag.TOKEN | Flag.EOS
    assert not engine.has_work()


def test_min_tokens_and_ignore_eos(folder: Path) -> None:
    force = Sampling(seed=0, temperature=0, logit_bias={tiny_models.EOS: 1000})
    requests = [submit(0, [5], 9, force, min_tokens=4), submit(1, [5], 9, force, ignore_eos=True)]
    outcomes = run(engine_of(folder), requests)
    assert len(outcomes[0].tokens) == 5
    assert (outcomes[0].tokens[-1], outcomes[0].finish) == (tiny_models.EOS, Finish.STOP)
    assert tiny_models.EOS not in outcomes[0].tokens[:4]
    assert (outcomes[1].tokens, outcomes[1].finish) == ([tiny_models.EOS] * 9, Finish.LENGTH)


def test_the_context_bounds_the_output(folder: Path) -> None:
    engine = engine_of(folder, max_model_len=20)
    outcome = run(engine, [submit(0, [5] * 12, 1000, ignore_eos=True)])[0]
    assert (len(outcome.tokens), outcome.finish) == (8, Finish.LENGTH)


def test_a_request_that_outgrows_the_pool_alone_ends_with_length(folder: Path) -> None:
    """All 128 places of one block are computed; the token drawn from the last one still comes."""
    outcomes = run(
        engine_of(folder, num_kv_blocks=1),
        [submit(0, [5] * 100, 500, ignore_eos=True), submit(1, [5] * 128, 5, ignore_eos=True)],
    )
    assert [(len(outcomes[slot].tokens), outcomes[slot].finish) for slot in (0, 1)] == [
        (29, Finish.LENGTH),
        (1, Finish.LENGTH),
    ]


@pytest.mark.parametrize(
    ("request_changes", "message"),
    [
        ({"ids": []}, "prompt is empty"),
        ({"ids": [5, -3]}, "prompt id -3 is outside the vocabulary of 384"),
        ({"ids": [5, 384, 400]}, "prompt id 384 is outside"),
        ({"ids": [5] * 300}, "300 tokens, the context of 300"),
        ({"ids": [5] * 257}, "257 tokens, the pool of 2 blocks holds 256"),
        ({"ids": [5], "max_tokens": 0}, "max_tokens is 0"),
        ({"ids": [5], "sampling": Sampling(seed=0, logit_bias={384: 1.0})}, "logit_bias id 384"),
    ],
)
def test_refusals_name_the_value_and_leave_nothing_behind(
    folder: Path, request_changes: dict[str, Any], message: str
) -> None:
    engine = engine_of(folder, num_kv_blocks=2, max_model_len=300)
    with pytest.raises(RequestRefusedError, match=message):
        engine.add(submit(0, **request_changes))
    assert not engine.has_work()
    run(engine, [submit(0, [5] * 256, 1)])


def test_cancel_in_every_phase_gives_back_all_blocks(folder: Path) -> None:
    engine = engine_of(folder, max_num_seqs=2, max_num_batched_tokens=150)
    decoding, prefilling, waiting = ([5] * length for length in (100, 400, 10))
    for slot, ids in enumerate((decoding, prefilling, waiting)):
        engine.add(submit(slot, ids, 50, ignore_eos=True))
    outcomes: dict[int, Outcome] = {}
    collect(engine, outcomes)
    collect(engine, outcomes)
    stats = engine.stats()
    assert (len(outcomes[0].tokens), set(outcomes)) == (2, {0})
    assert (stats.running, stats.waiting, stats.blocks_used) == (2, 1, 1 + 4)
    for slot, blocks in ((1, 1), (2, 1), (0, 0)):
        assert engine.cancel(slot, 1)
        assert engine.stats().blocks_used == blocks
        assert not engine.cancel(slot, 1)
    assert not engine.has_work()
    assert len(engine.step().records) == 0


def test_cancel_minds_the_generation(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add(submit(0, [5], 5))
    assert not engine.cancel(0, 2)
    assert engine.has_work()


def test_a_seeded_request_gives_the_same_tokens_in_any_company(folder: Path) -> None:
    """Alone, among others, in chunks, and preempted: the same prompt, the same seed, the same draws."""
    prompts = random_prompts([124, 120, 122, 30], seed=9)
    settings = [
        Sampling(seed=3, temperature=0.8, top_p=0.9),
        Sampling(seed=3, temperature=1.2, top_k=20, min_p=0.01),
        Sampling(seed=2**64 - 1, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3),
        GREEDY,
    ]
    requests = [
        submit(slot, ids, 16, sampling, ignore_eos=True)
        for slot, (ids, sampling) in enumerate(zip(prompts, settings, strict=True))
    ]
    alone = {request.slot: run(engine_of(folder), [request])[request.slot].tokens for request in requests}
    for changes in ({}, {"max_num_batched_tokens": 50}, {"num_kv_blocks": 5}):
        engine = engine_of(folder, **changes)
        together = run(engine, requests)
        assert {slot: outcome.tokens for slot, outcome in together.items()} == alone
        assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in changes)
    assert len({tuple(tokens) for tokens in alone.values()}) == 4


def test_logprobs_come_with_their_events(folder: Path) -> None:
    sampling = [Sampling(seed=0, temperature=0, logprobs=count) for count in (3, 0)]
    outcomes = run(engine_of(folder), [submit(slot, [9, 8], 4, one) for slot, one in enumerate(sampling)])
    for outcome in outcomes.values():
        assert all(logprob < 0 for logprob in outcome.logprobs)
    assert [top.position for top in outcomes[0].tops] == outcomes[0].positions
    assert [top.ids[0] for top in outcomes[0].tops] == outcomes[0].tokens
    assert [top.logprobs[0] for top in outcomes[0].tops] == outcomes[0].logprobs
    assert {len(top.ids) for top in outcomes[0].tops} == {3}
    assert outcomes[1].tops == []
    assert outcomes[1].logprobs == outcomes[0].logprobs


def test_penalties_count_prompt_and_output(folder: Path) -> None:
    """A huge repetition penalty forbids the prompt's ids; a huge presence penalty only what was generated."""
    prompt = [5, 6, 7]
    favourite = first_greedy_token(folder, prompt)
    lifted = {favourite: 50.0}
    presence = Sampling(seed=0, temperature=0, presence_penalty=1e4, logit_bias=lifted)
    repetition = Sampling(seed=0, temperature=0, repetition_penalty=1e6, logit_bias=dict.fromkeys(prompt, 0.0))
    outcomes = run(engine_of(folder), [submit(0, [*prompt, favourite], 6, presence), submit(1, prompt, 6, repetition)])
    assert outcomes[0].tokens[0] == favourite
    assert len(set(outcomes[0].tokens)) == 6
    assert not set(outcomes[1].tokens) & set(prompt)


def test_statistics_count_tokens_of_both_kinds(folder: Path) -> None:
    engine = engine_of(folder, max_num_batched_tokens=64)
    run(engine, [submit(0, [5] * 150, 5, ignore_eos=True)])
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (150, 4, 7)
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (0, 0, 0, 16)


def test_pages_are_the_pool_itself(folder: Path) -> None:
    """What a page holds moves a request's keys and values: overwriting them changes what comes next."""
    engine = engine_of(folder)
    pages = engine.pages()
    assert pages is not None
    assert pages.shape == (16, engine.facts.page_bytes)
    assert not pages.any()
    request = submit(0, random_prompts([100], seed=1)[0], 6, ignore_eos=True)
    expected = run(engine_of(folder), [request])[0].tokens
    engine.add(request)
    outcomes: dict[int, Outcome] = {}
    collect(engine, outcomes)
    (block,) = np.flatnonzero(pages.any(axis=1))
    kept = pages[block].copy()
    pages[block] = 0
    pages[block] = kept
    collect(engine, outcomes)
    assert outcomes[0].tokens == expected[:2]
    pages[block].view(np.float32)[:] *= -1
    while engine.has_work():
        collect(engine, outcomes)
    assert outcomes[0].tokens != expected


def test_a_model_that_overflows_ends_the_request_and_poisons_nobody(folder: Path, tmp_path: Path) -> None:
    """One id's embedding is infinite: whoever uses it gets an error, and its block is clean for the next."""
    model = tiny_models.plain(folder)
    with torch.no_grad():
        dict(model.named_parameters())["model.embed_tokens.weight"][300] = math.inf
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, num_kv_blocks=3)
    broken = run(engine, [submit(0, [*[5] * 50, 300, 6], 5)])[0]
    assert (broken.tokens, broken.finish) == ([], Finish.ERROR)
    assert "position 52 are not finite" in broken.errors[0].message
    assert not broken.errors[0].client_fault
    # The short one gets that block, and beside a longer one the rest of it is read, masked.
    after = [submit(1, [5, 6, 7], 5, ignore_eos=True), submit(2, [8] * 60, 5, ignore_eos=True)]
    expected = run(engine_of(folder), after)
    assert {slot: outcome.tokens for slot, outcome in run(engine, after).items()} == {
        slot: outcome.tokens for slot, outcome in expected.items()
    }


def test_close_gives_back_the_pool(folder: Path) -> None:
    engine = engine_of(folder)
    pages = engine.pages()
    assert pages is not None
    engine.add(submit(0, [5], 5))
    engine.close()
    assert not engine.has_work()
