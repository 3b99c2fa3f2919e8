"""Generations over a rank pair: the test says which ids come in which batches and reads what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ipc.messages import Finish, Flag, Submit, TopLogprobs
from server.account import Account, Call
from server.generate import Generation, Piece
from server.tokenizer.pieces import Pieces
from tests.byte_tokenizer import EOS, VOCAB_SIZE
from tests.rank_pair import RankPair, rank_pair, record, submitter_of, work_of

LOGPROB: Final = -0.5


def generation_of(pair: RankPair, pieces: Pieces, stops: Sequence[str] = (), min_tokens: int = 0) -> Generation:
    """One that is not started yet."""
    work = replace(work_of(1, 2, 3), min_tokens=min_tokens)
    account = Account(pair.metrics, Call("r1", "test", "anonymous"), len(work.ids))
    return Generation(submitter_of([pair.rank]), work, pieces, account, stops)


def newest(pair: RankPair) -> Submit:
    """The request that the engine was given last."""
    submit = pair.commands()[-1]
    assert isinstance(submit, Submit)
    return submit


def publish(pair: RankPair, submit: Submit, ids: Sequence[int], at: int, finish: Finish = Finish.NONE) -> None:
    """Have the engine answer with a batch whose first token is the answer's token number `at`."""
    records, events = [], []
    for position, id_ in enumerate(ids, at):
        one = record(submit.slot, submit.generation, id_, position=position, flags=Flag.TOP)
        one["logprob"] = LOGPROB
        records.append(one)
        best = (id_, (id_ + 1) % VOCAB_SIZE)
        events.append(TopLogprobs(submit.slot, submit.generation, position, best, (LOGPROB, LOGPROB - 1)))
    records[-1]["finish"] = finish
    if finish is Finish.STOP and ids[-1] == EOS:
        records[-1]["flags"] |= np.uint16(Flag.EOS)
    pair.engine.publish(np.concatenate(records), events)


async def pieces_of(
    pieces: Pieces, batches: Sequence[Sequence[int]], finish: Finish, stops: Sequence[str] = (), min_tokens: int = 0
) -> list[list[Piece]]:
    """What is read, batch by batch, of an answer whose tokens come so."""
    found: list[list[Piece]] = []
    with rank_pair() as pair, generation_of(pair, pieces, stops, min_tokens) as generation:
        await generation.start()
        collector, submit, at = pair.collector(), newest(pair), 0
        reader = generation.pieces()
        for number, batch in enumerate(batches, 1):
            publish(pair, submit, batch, at, finish if number == len(batches) else Finish.NONE)
            at += len(batch)
            collector.drain_rest()
            if (read := await anext(reader, None)) is None:
                break
            found.append(read)
        assert await anext(reader, None) is None
    return found
