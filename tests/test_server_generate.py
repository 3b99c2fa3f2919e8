"""A generation's end: whichever way its block is left, it is counted once, told to the engine and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from ipc.messages import Cancel, Finish, Submit
from server.account import Account
from server.errors import ApiError, RankLostError
from server.generate import Generation
from server.tokenizer.detok import Detokenizer
from server.tokenizer.pieces import Pieces
from tests.byte_tokenizer import byte_tokenizer
from tests.rank_pair import RankPair, rank_pair, tokens

OUTCOMES = ("finished", "aborted", "errors")


@pytest.fixture
def pair() -> Iterator[RankPair]:
    with rank_pair() as made:
        yield made


def generation_of(pair: RankPair) -> Generation:
    account = Account(pair.metrics, "r1", "test", 0.0, 3)
    return Generation(pair.submit(), Detokenizer(Pieces(byte_tokenizer())), account)


def deliver(pair: RankPair, ids: list[int], finish: Finish = Finish.NONE) -> Submit:
    """Have the engine answer its newest request."""
    submit = pair.commands()[-1]
    assert isinstance(submit, Submit)
    pair.answer(tokens(submit.slot, submit.generation, ids, finish))
    pair.collector().drain_rest()
    return submit


def counted(pair: RankPair) -> dict[str, float | None]:
    return {name: pair.metrics.registry.get_sample_value(f"deepinfer:{name}_total") for name in OUTCOMES}


@pytest.mark.parametrize(("finish", "outcome"), [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
async def test_an_answer_read_to_its_end_is_finished(
    pair: RankPair, finish: Finish, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    generation = generation_of(pair)
    deliver(pair, [104, 105], finish)
    with generation:
        (pieces,) = [batch async for batch in generation.batches()]
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("h", None), ("i", outcome)]
    assert counted(pair) == {"finished": 1, "aborted": 0, "errors": 0}
    assert f"outcome={outcome} prompt_tokens=3 cached_tokens=0 completion_tokens=2" in caplog.text
    assert pair.commands() == []


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ConnectionResetError("left"), None])
async def test_a_client_that_leaves_aborts_it_in_the_engine(pair: RankPair, error: BaseException | None) -> None:
    generation = generation_of(pair)
    submit = deliver(pair, [104])
    generation.__enter__()
    await anext(generation.batches())
    generation.__exit__(type(error) if error else None, error, None)
    assert counted(pair) == {"finished": 0, "aborted": 1, "errors": 0}
    assert pair.commands() == [Cancel(submit.slot, submit.generation)]


async def test_a_lost_rank_is_an_error(pair: RankPair) -> None:
    generation = generation_of(pair)
    deliver(pair, [104])

    async def read() -> None:
        with generation:
            async for _ in generation.batches():
                pair.rank.lose("it died", RankLostError("gone"))

    with pytest.raises(ApiError, match="gone"):
        await read()
    assert counted(pair) == {"finished": 0, "aborted": 0, "errors": 1}
    assert pair.commands() == []


async def test_a_cut_character_is_flushed_with_the_last_token(pair: RankPair) -> None:
    generation = generation_of(pair)
    deliver(pair, [0xE2, 0x82], Finish.LENGTH)
    with generation:
        (pieces,) = [batch async for batch in generation.batches()]
    assert [piece.text for piece in pieces] == ["", "\ufffd"]
