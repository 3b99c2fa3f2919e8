"""The engine without a model: its answers depend on its pages, and whatever happens its blocks come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake import FakeEngine
from engine.fake_rows import BLOCK_TOKENS, tokens_of
from engine.fake_settings import FakePace
from engine.protocol import RequestRefusedError, StartError
from ipc.messages import Finish, Flag, Launch, LinkFds, Submit, TopLogprobs
from tests.byte_tokenizer import EOS, MAX_MODEL_LEN, VOCAB_SIZE, write_model
from tests.fake_engine import NO_PACE, PROMPT, engine_of, request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fake") / "bytes")


def run(
    engine: FakeEngine, *requests: Submit, meddle: Callable[[int], object] = lambda _: None
) -> dict[int, list[int]]:
    """Slot -> ids. `meddle` is called before each step with its number."""
    for one in requests:
        engine.add(one)
    found: dict[int, list[int]] = {one.slot: [] for one in requests}  # and those already there
    number = 0
    while engine.has_work():
        meddle(number)
        for record in engine.step().records:
            found.setdefault(int(record["slot"]), []).append(int(record["token"]))
        number += 1
    return found


def answer(engine: FakeEngine, *args: Any, **fields: Any) -> list[int]:
    return run(engine, request(0, *args, **fields))[0]


def blocks_used(engine: FakeEngine) -> int:
    return engine.stats().blocks_used


def test_the_same_request_has_the_same_answer_in_any_company(model: Path) -> None:
    alone = answer(engine_of(model))
    together = run(engine_of(model), request(1, [5] * 300, 9), request(0), request(2, [1], 40))
    assert together[0] == alone
    assert len(alone) == 20


@pytest.mark.parametrize("change", [{"seed": 2}, {"ids": [*PROMPT[:-1], 7]}, {"ids": [1, 0, *PROMPT[2:]]}])
def test_another_seed_or_prompt_has_another_answer(model: Path, change: dict[str, Any]) -> None:
    assert answer(engine_of(model), **change) != answer(engine_of(model))


def test_greedy_answers_do_not_depend_on_the_seed(model: Path) -> None:
    greedy = [answer(engine_of(model), seed=seed, temperature=0.0) for seed in (1, 2)]
    assert greedy[0] == greedy[1]


@given(budget=st.integers(4, 400), length=st.integers(1, 400))
def test_a_prefill_in_chunks_equals_a_whole_one(model: Path, budget: int, length: int) -> None:
    ids = [(7 * index) % 256 for index in range(length)]
    chunked = engine_of(model, max_num_batched_tokens=budget)
    assert answer(chunked, ids, 5) == answer(engine_of(model), ids, 5)
    assert chunked.stats().prefill_tokens == length


@pytest.mark.parametrize("page", [0, 1], ids=["full page", "last page"])
@pytest.mark.parametrize("harm", ["wrong", "missing", "stale"])
def test_a_harmed_page_changes_the_answer(model: Path, page: int, harm: str) -> None:
    """Harm done after the page was written and before it is read; chunks of one block leave the time."""

    def meddle(number: int) -> None:
        pages = engine.pages().reshape(engine.facts.num_blocks, engine.facts.page_bytes)
        block = engine._rows.blocks[0, page]
        if number == page + 1:
            harms = {"wrong": pages[block, 8:16], "missing": np.zeros(8, np.uint8), "stale": older[page, :8]}
            pages[block, :8] = harms[harm]

    ids = [*range(256), 3]
    older = entries_of(engine_of(model), [9] * 257)
    engine = engine_of(model, max_num_batched_tokens=BLOCK_TOKENS)
    assert run(engine, request(0, ids, 5), meddle=meddle)[0] != answer(engine_of(model), ids, 5)


def entries_of(engine: FakeEngine, ids: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The pages another prompt leaves in an engine's first blocks."""
    answer(engine, ids, 1)
    return engine.pages().reshape(engine.facts.num_blocks, engine.facts.page_bytes).copy()


def test_pages_are_a_view_of_the_declared_size(model: Path) -> None:
    engine = engine_of(model)
    assert engine.pages().nbytes == engine.facts.num_blocks * engine.facts.page_bytes
    assert engine.facts.page_bytes == 8 * BLOCK_TOKENS
    assert not engine.pages().any()
    answer(engine)
    assert engine.pages().any()


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=8))
def test_a_cancel_in_any_phase_frees_everything(model: Path, plan: list[tuple[int, int, int]]) -> None:
    """Each request is cancelled before the step of its number, if it still runs by then."""
    engine = engine_of(model, max_num_batched_tokens=100, num_kv_blocks=12, max_num_seqs=3)

    def meddle(number: int) -> None:
        for slot, (_, _, when) in enumerate(plan):
            if when == number:
                held = blocks_used(engine)
                if engine.cancel(slot, 1):
                    assert blocks_used(engine) <= held
                assert not engine.cancel(slot, 1)

    found = run(
        engine, *(request(slot, [1] * length, count) for slot, (length, count, _) in enumerate(plan)), meddle=meddle
    )
    for slot, ids in found.items():
        assert len(ids) <= plan[slot][1]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert len(answer(engine)) == 20


def test_a_cancel_for_another_generation_or_slot_touches_nobody(model: Path) -> None:
    engine = engine_of(model)
    engine.add(request())
    assert not engine.cancel(0, 2)
    assert not engine.cancel(1, 1)
    engine.step()
    assert not engine.cancel(0, 2)
    assert engine.stats().running == 1
    assert engine.cancel(0, 1)
    assert not engine.has_work()


def test_a_request_waits_for_blocks_and_runs_when_they_are_free(model: Path) -> None:
    engine = engine_of(model, num_kv_blocks=3)
    for slot in range(3):
        engine.add(request(slot, max_tokens=56))  # two blocks each
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (1, 2, 2)
    assert run(engine, request(3))[3] == answer(engine_of(model))
    assert blocks_used(engine) == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [1, VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ({"ids": [-1]}, "token id -1 is outside"),
        ({"ids": [1] * MAX_MODEL_LEN}, f"{MAX_MODEL_LEN} prompt tokens leave no room in a context of {MAX_MODEL_LEN}"),
        ({"max_tokens": 5000}, "200 prompt tokens and max_tokens 5000 need 41 KV blocks, the pool has 8"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(model: Path, change: dict[str, Any], told: str) -> None:
    engine = engine_of(model, num_kv_blocks=8)
    with pytest.raises(RequestRefusedError, match=told):
        engine.add(request(**change))
    assert not engine.has_work()


def test_an_answer_ends_by_length_at_max_tokens_and_at_the_context(model: Path) -> None:
    engine = engine_of(model, max_model_len=210)
    for slot, max_tokens, length in ((0, 3, 3), (1, 100, 10)):
        engine.add(request(slot, max_tokens=max_tokens))
        records = [record for _ in range(length) for record in engine.step().records]
        assert [int(record["finish"]) for record in records] == [0] * (length - 1) + [Finish.LENGTH]
        assert [int(record["position"]) for record in records] == list(range(200, 200 + length))
        assert not engine.has_work()


def test_an_answer_ends_by_the_eos_id_and_only_by_a_flagged_one(model: Path) -> None:
    engine = engine_of(model)
    ended = 0
    for seed in range(20):
        engine.add(request(seed=seed, max_tokens=400, ignore_eos=False))
        records = []
        while engine.has_work():
            records += list(engine.step().records)
        for record in records[:-1]:
            assert int(record["token"]) != EOS
            assert not record["flags"] & Flag.EOS
        last = records[-1]
        if last["finish"] == Finish.STOP:
            ended += 1
            assert int(last["token"]) == EOS
            assert last["flags"] & Flag.EOS
    assert ended > 10


@settings(max_examples=30)
@given(seed=st.integers(0, 2**64 - 1), least=st.integers(0, 100))
def test_min_tokens_come_before_any_end(model: Path, seed: int, least: int) -> None:
    assert len(answer(engine_of(model), seed=seed, max_tokens=110, min_tokens=least, ignore_eos=False)) >= least


def test_no_end_of_sequence_is_drawn_even_where_they_are_neighbours(tmp_path: Path) -> None:
    config = {"vocab_size": 6, "eos_token_id": [3, 4, 5]}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    ids = answer(engine_of(tmp_path), [0, 1], 400)
    assert set(ids) == {0, 1, 2}


def test_top_logprobs_come_with_their_record(model: Path) -> None:
    engine = engine_of(model)
    engine.add(request(max_tokens=2, logprobs=3))
    output = engine.step()
    (record,) = output.records
    (event,) = output.events
    assert isinstance(event, TopLogprobs)
    assert record["flags"] & Flag.TOP
    assert (event.slot, event.generation, event.position) == (0, 1, int(record["position"]))
    assert event.ids[0] == record["token"]
    assert event.logprobs == (0.0, -1.0, -2.0)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"{}", "vocab_size"), (b"[", r"config\.json"), (b'{"vocab_size":"big"}', r"config\.json: .*vocab_size")],
)
def test_a_bad_model_configuration_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StartError, match=told):
        engine_of(tmp_path)


@pytest.mark.parametrize("name", ["DEEPINFER_FAKE_STEP_MS", "DEEPINFER_FAKE_PREFILL_TOKENS_PER_S"])
@pytest.mark.parametrize("value", ["fast", "-1", "inf", "nan"])
def test_a_bad_pace_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be .*'{value}'"):
        FakePace.from_environment()


def test_the_pace_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FakePace.from_environment() == NO_PACE
    monkeypatch.setenv("DEEPINFER_FAKE_STEP_MS", "5")
    monkeypatch.setenv("DEEPINFER_FAKE_PREFILL_TOKENS_PER_S", "1000")
    assert FakePace.from_environment() == FakePace(step_s=0.005, prefill_token_s=0.001)


def test_states_are_asked_for_by_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(0, 1, "fake", str(model), LinkFds(0, 0, 0), 0)
    plain = FakeEngine(launch, NO_PACE).facts
    assert (plain.state_bytes, plain.keep_tokens, plain.state_window, plain.first_state) == (0, 1, 0, 0)
    monkeypatch.setenv("DEEPINFER_FAKE_STATES", "1")
    facts = FakeEngine(launch, NO_PACE).facts
    assert (facts.state_bytes, facts.keep_tokens, facts.state_window, facts.first_state) == (64, 140, 652, 256)
    assert facts.layout_digest != plain.layout_digest
    monkeypatch.setenv("DEEPINFER_FAKE_STATES", "yes")
    with pytest.raises(ValueError, match="DEEPINFER_FAKE_STATES must be 0 or 1, got 'yes'"):
        FakeEngine(launch, NO_PACE)


def test_an_answer_tells_its_tokens_back(model: Path) -> None:
    """What a page holds can be read as the tokens that made it, which is how generated pages get their keys."""
    engine = engine_of(model)
    engine.add(request(0, list(range(250)), 134))
    while engine.stats().decode_tokens < 133:
        engine.step()
    held = tokens_of(engine.pages().view(np.uint64)[:2].reshape(-1))  # the first blocks that were handed out
    assert held[:250].tolist() == list(range(250))
    assert held[250:].tolist() == answer(engine_of(model), list(range(250)), 6)
