"""A generation: its pieces, its stop strings, and its end, which is counted once, told to the engine and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Cancel, Finish, Submit
from server.errors import ApiError, RankLostError
from server.generate import Generation, Piece
from server.stream import Ids
from server.tokenizer.detok import Detokenizer
from server.tokenizer.pieces import Pieces
from server.tokenizer.stops import before_stop
from tests.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer
from tests.generations import generation_of, newest, pieces_of, publish
from tests.rank_pair import RankPair, rank_pair, until

OUTCOMES = ("finished", "aborted", "errors")
PIECES = Pieces(byte_tokenizer())

# Few letters, so that stop strings are met, half met and nested; and what is no text by itself.
IDS = st.sampled_from([*b"abc", *"\N{EURO SIGN}".encode(), 0x80, EOS, *range(VOCAB_SIZE)])
BATCHES = st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=8)
STOPS = st.lists(st.text(st.sampled_from("abc\N{EURO SIGN}\N{REPLACEMENT CHARACTER}"), min_size=1), max_size=3)
ENDS = st.sampled_from([Finish.STOP, Finish.LENGTH])


@pytest.fixture
def pair() -> Iterator[RankPair]:
    with rank_pair() as made:
        yield made


async def started(pair: RankPair) -> Generation:
    generation = generation_of(pair, PIECES)
    await generation.start()
    return generation


def deliver(pair: RankPair, ids: list[int], finish: Finish = Finish.NONE) -> Submit:
    """Have the engine answer its newest request."""
    submit = newest(pair)
    publish(pair, submit, ids, 0, finish)
    pair.collector().drain_rest()
    return submit


def counted(pair: RankPair) -> dict[str, float | None]:
    return {name: pair.metrics.registry.get_sample_value(f"deepinfer:{name}_total") for name in OUTCOMES}


def text_of(ids: list[int]) -> str:
    detokenizer = Detokenizer(PIECES)
    return detokenizer.push(ids) + detokenizer.flush()


def joined(pieces: list[list[Piece]]) -> str:
    return "".join(piece.text for batch in pieces for piece in batch)


# ---- pieces and stop strings ----


@given(BATCHES, STOPS, ENDS)
async def test_what_is_shown_is_the_text_before_the_stop(
    batches: list[list[int]], stops: list[str], finish: Finish
) -> None:
    ids = [id_ for batch in batches for id_ in batch]
    made = await pieces_of(PIECES, batches, finish, stops)
    # The end-of-sequence id that ended the answer is no text; earlier ones are special and show nothing either.
    whole = text_of(ids)
    assert joined(made) == before_stop(whole, stops)
    *before, last = [piece.finish_reason for batch in made for piece in batch]
    assert before == [None] * len(before)
    stopped = any(stop in whole for stop in stops)
    assert last == ("stop" if stopped or finish is Finish.STOP else "length")


@given(BATCHES, STOPS, ENDS)
async def test_how_tokens_were_batched_changes_nothing(
    batches: list[list[int]], stops: list[str], finish: Finish
) -> None:
    ids = [id_ for batch in batches for id_ in batch]
    one_by_one = await pieces_of(PIECES, [[id_] for id_ in ids], finish, stops)
    at_once = await pieces_of(PIECES, [ids], finish, stops)
    as_given = await pieces_of(PIECES, batches, finish, stops)
    flat = [[piece for batch in made for piece in batch] for made in (one_by_one, at_once, as_given)]
    assert flat[0] == flat[1] == flat[2]


@given(BATCHES, STOPS.filter(bool), st.integers(0, 12))
async def test_stop_strings_count_from_the_last_token_that_must_come(
    batches: list[list[int]], stops: list[str], min_tokens: int
) -> None:
    ids = [id_ for batch in batches for id_ in batch]
    made = await pieces_of(PIECES, batches, Finish.LENGTH, stops, min_tokens)
    flat = [piece for batch in made for piece in batch]
    assert len(flat) >= min(min_tokens, len(ids))
    detokenizer = Detokenizer(PIECES)
    free = detokenizer.push(ids[:min_tokens]) + (detokenizer.flush() if min_tokens >= len(ids) else "")
    assert joined(made) == free + before_stop(text_of(ids)[len(free) :], stops)


async def test_a_stop_string_ends_it_in_the_engine_too(pair: RankPair) -> None:
    with generation_of(pair, PIECES, ["b"]) as generation:
        await generation.start()
        submit = deliver(pair, list(b"abc"))
        (pieces,) = [batch async for batch in generation.pieces()]
        assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a", None), ("", "stop")]
        assert pair.commands() == [Cancel(submit.slot, submit.generation)]
    assert generation.account.completion_tokens == 2
    assert counted(pair) == {"finished": 1, "aborted": 0, "errors": 0}
    assert pair.commands() == []


async def test_a_cut_character_is_flushed_with_the_last_token(pair: RankPair) -> None:
    generation = await started(pair)
    deliver(pair, [0xE2, 0x82], Finish.LENGTH)
    with generation:
        (pieces,) = [batch async for batch in generation.pieces()]
    assert [piece.text for piece in pieces] == ["", "\ufffd"]


# ---- as bare ids ----


async def test_diverted_ids_are_counted_and_followed_by_the_last(pair: RankPair) -> None:
    seen: list[int] = []

    def send(ids: Ids) -> bool:
        seen.extend(ids.tolist())
        return True

    with await started(pair) as generation:
        submit = deliver(pair, [1])
        ids, end = await generation.next_ids()
        assert (ids.tolist(), end) == ([1], None)
        diverted = asyncio.create_task(generation.divert(send))
        await asyncio.sleep(0)
        publish(pair, submit, [2, 3], 1)
        pair.collector().drain_rest()
        assert seen == [2, 3]
        publish(pair, submit, [4], 3, Finish.LENGTH)
        pair.collector().drain_rest()
        await diverted
        ids, end = await generation.next_ids()
        assert (ids.tolist(), end, seen) == ([4], "length", [2, 3])
    assert generation.account.completion_tokens == 4
    assert counted(pair) == {"finished": 1, "aborted": 0, "errors": 0}


# ---- ends ----


@pytest.mark.parametrize(("finish", "outcome"), [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
async def test_an_answer_read_to_its_end_is_finished(
    pair: RankPair, finish: Finish, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    generation = await started(pair)
    deliver(pair, [104, 105], finish)
    with generation:
        (pieces,) = [batch async for batch in generation.pieces()]
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("h", None), ("i", outcome)]
    assert counted(pair) == {"finished": 1, "aborted": 0, "errors": 0}
    assert f"key=anonymous outcome={outcome} prompt_tokens=3 cached_tokens=0 completion_tokens=2" in caplog.text
    assert pair.commands() == []


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ConnectionResetError("left"), None])
async def test_a_client_that_leaves_aborts_it_in_the_engine(pair: RankPair, error: BaseException | None) -> None:
    generation = await started(pair)
    submit = deliver(pair, [104])
    generation.__enter__()
    await anext(generation.pieces())
    generation.__exit__(type(error) if error else None, error, None)
    assert counted(pair) == {"finished": 0, "aborted": 1, "errors": 0}
    assert pair.commands() == [Cancel(submit.slot, submit.generation)]


async def test_one_that_never_got_a_turn_is_logged_and_not_counted(
    pair: RankPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waiting = [generation_of(pair, PIECES) for _ in range(pair.rank.slots.size)]
    for generation in waiting:
        await generation.start()

    async def wait_in_vain() -> None:
        with generation_of(pair, PIECES) as generation:
            await generation.start()

    task = asyncio.create_task(wait_in_vain())
    await asyncio.sleep(0)
    task.cancel()
    await until(task.done)
    assert counted(pair) == {"finished": 0, "aborted": 0, "errors": 0}
    assert "outcome=aborted prompt_tokens=3 cached_tokens=0 completion_tokens=0 queue_s=-" in caplog.text
    assert pair.rank.load == pair.rank.slots.size


async def test_a_lost_rank_is_an_error(pair: RankPair) -> None:
    generation = await started(pair)
    deliver(pair, [104])

    async def read() -> None:
        with generation:
            async for _ in generation.pieces():
                pair.rank.lose("it died", RankLostError("gone"))

    with pytest.raises(ApiError, match="gone"):
        await read()
    assert counted(pair) == {"finished": 0, "aborted": 0, "errors": 1}
    assert pair.commands() == []
