"""Admission: what reaches the engine, and every refusal, which must leave nothing taken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import MessageTooLargeError
from ipc.messages import Cancel, Sampling, Submit
from server.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RankLostError,
    ShuttingDownError,
)
from server.fields import SamplingFields
from server.rank import RankState
from server.sampling import sampling_of
from server.submit import Submitter
from tests.rank_pair import FACTS, SHAPE, RankPair, rank_pair

GREEDY = Sampling(seed=1, temperature=0)


@pytest.fixture
def pair() -> Iterator[RankPair]:
    with rank_pair() as made:
        yield made


def array(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def test_the_engine_gets_the_request_as_it_was_given(pair: RankPair) -> None:
    Submitter([pair.rank]).submit("mine", array(5, 0, 259), 7, GREEDY, min_tokens=2, ignore_eos=True)
    (command,) = pair.commands()
    assert isinstance(command, Submit)
    assert np.frombuffer(command.ids, "<i4").tolist() == [5, 0, 259]
    assert (command.request_id, command.max_tokens, command.min_tokens, command.ignore_eos) == ("mine", 7, 2, True)
    assert command.sampling == GREEDY
    assert pair.rank.slots.taken == 1


def test_requests_go_to_the_rank_that_holds_the_fewest() -> None:
    with rank_pair(index=0) as one, rank_pair(index=1) as two:
        submitter = Submitter([one.rank, two.rank])
        for _ in range(4):
            submitter.submit("r", array(1), 1, GREEDY)
        assert (len(one.commands()), len(two.commands())) == (2, 2)


@given(length=st.integers(1, 600))
def test_the_context_leaves_room_for_at_least_one_token(length: int) -> None:
    with rank_pair() as pair:
        submitter = Submitter([pair.rank])
        if length < FACTS.max_model_len:
            assert submitter.check(np.zeros(length, np.int32), "prompt") == FACTS.max_model_len - length
            return
        with pytest.raises(ContextLengthError) as caught:
            submitter.check(np.zeros(length, np.int32), "prompt")
        assert f" {length} tokens" in caught.value.message
        assert f" {FACTS.max_model_len} tokens" in caught.value.message


@pytest.mark.parametrize(("ids", "told"), [((), "no tokens"), ((1, -2, 3), "id -2"), ((1, 260), "id 260")])
def test_a_prompt_the_engine_could_not_take_is_refused_by_field(
    pair: RankPair, ids: tuple[int, ...], told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"prompt: .*{told}") as caught:
        Submitter([pair.rank]).check(array(*ids), "prompt")
    assert caught.value.param == "prompt"


def test_a_full_table_refuses_and_a_freed_slot_admits(pair: RankPair) -> None:
    streams = [pair.submit() for _ in range(4)]
    with pytest.raises(OverloadedError, match="rank 0 holds all the requests it can"):
        pair.submit()
    first = pair.commands()[0]
    assert isinstance(first, Submit)
    pair.rank.slots.release(first.slot)
    pair.submit()
    assert len(streams) == pair.rank.slots.taken == 4


def test_a_full_ring_refuses_and_takes_no_slot(pair: RankPair) -> None:
    filler = Submit(0, 0, "filler", bytes(SHAPE.submit_bytes // 4), 1, GREEDY)
    while pair.server.send(filler):
        pass
    with pytest.raises(OverloadedError, match="the submit ring of rank 0 is full"):
        pair.submit(*[1] * (SHAPE.submit_bytes // 16))
    assert pair.rank.slots.taken == 0
    pair.commands()
    pair.submit()
    assert pair.rank.slots.taken == 1


def test_a_prompt_no_ring_could_hold_takes_no_slot(pair: RankPair) -> None:
    with pytest.raises(MessageTooLargeError):
        pair.submit(*[1] * (SHAPE.submit_bytes // 4))
    assert pair.rank.slots.taken == 0


def test_a_closed_submitter_refuses_at_both_steps(pair: RankPair) -> None:
    submitter = Submitter([pair.rank])
    submitter.closed = True
    with pytest.raises(ShuttingDownError):
        submitter.check(array(1), "prompt")
    with pytest.raises(ShuttingDownError):
        submitter.submit("r", array(1), 1, GREEDY)
    assert pair.commands() == []


def test_a_lost_rank_is_not_chosen_and_its_requests_fail(pair: RankPair) -> None:
    stream = pair.submit()
    assert pair.rank.lose("it died", RankLostError("gone")) == 1
    assert (pair.rank.state, pair.rank.reason, pair.rank.slots.taken) == (RankState.LOST, "it died", 0)
    assert stream.ended
    with pytest.raises(NotReadyError, match="rank 0 lost"):
        pair.submit()


def test_a_cancel_names_the_request_once_and_keeps_its_slot(pair: RankPair) -> None:
    stream = pair.submit()
    (submit,) = pair.commands()
    assert isinstance(submit, Submit)
    stream.cancel()
    stream.cancel()
    assert pair.commands() == [Cancel(submit.slot, submit.generation)]
    assert pair.rank.slots.taken == 1


def test_sampling_fields_become_the_engine_s() -> None:
    fields = SamplingFields(seed=-1, temperature=0.5, top_k=-1, logit_bias={"0": 1.0, "259": -100.0})
    sampling = sampling_of(fields, 3, 260)
    assert (sampling.seed, sampling.top_k, sampling.logprobs) == (2**64 - 1, 0, 3)
    assert sampling.logit_bias == {0: 1.0, 259: -100.0}
    seeds = {sampling_of(SamplingFields(), -1, 260).seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize("key", ["260", "-1", "+1", "1_0", "", " 1", "1.0", "x", "٣", "9" * 5000, "0" * 11])
def test_a_bias_for_what_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias: key") as caught:
        sampling_of(SamplingFields(logit_bias={key: 1.0}), -1, 260)
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 100
