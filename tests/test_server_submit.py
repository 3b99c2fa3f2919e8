"""The way into a rank: what reaches the engine, and every refusal, which must leave nothing taken or promised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import MessageTooLargeError
from ipc.messages import Cancel, Finish, Sampling, Stats, Submit
from server.admission import Limits
from server.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RankLostError,
    ShuttingDownError,
)
from server.fields import SamplingFields
from server.rank import RATE_WEIGHT, STEPS_AHEAD, Rank, RankState
from server.sampling import sampling_of
from server.work import Work
from tests.rank_pair import FACTS, SHAPE, SLOTS, STEP_TOKENS, RankPair, rank_pair, record, submitter_of, until, work_of

GREEDY = Sampling(seed=1, temperature=0)


@pytest.fixture
def pair() -> Iterator[RankPair]:
    with rank_pair() as made:
        yield made


def array(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def end_one(pair: RankPair) -> None:
    """The engine ends the newest request that it was given."""
    submit = [command for command in pair.commands() if isinstance(command, Submit)][-1]
    pair.answer(record(submit.slot, submit.generation, finish=Finish.CANCELLED))


def nothing_held(rank: Rank) -> bool:
    return (rank.load, rank.pending_tokens) == (0, 0)


async def test_the_engine_gets_the_request_as_it_was_given(pair: RankPair) -> None:
    work = Work("mine", "key", b"s", array(5, 0, 259), 7, GREEDY, min_tokens=2, ignore_eos=True)
    await submitter_of([pair.rank]).submit(work)
    (command,) = pair.commands()
    assert isinstance(command, Submit)
    assert np.frombuffer(command.ids, "<i4").tolist() == [5, 0, 259]
    assert (command.request_id, command.max_tokens, command.min_tokens, command.ignore_eos) == ("mine", 7, 2, True)
    assert command.sampling == GREEDY
    assert (pair.rank.slots.taken, pair.rank.load, pair.rank.pending_tokens) == (1, 1, 3)


async def test_conversations_spread_and_their_turns_go_home() -> None:
    with rank_pair(index=0) as one, rank_pair(index=1) as two:
        submitter = submitter_of([one.rank, two.rank])
        for session in (b"a", b"b", b"a", b"b"):
            await submitter.submit(work_of(1, session=session))
        assert (len(one.commands()), len(two.commands())) == (2, 2)


@given(length=st.integers(1, 600))
def test_the_context_leaves_room_for_at_least_one_token(length: int) -> None:
    with rank_pair() as pair:
        submitter = submitter_of([pair.rank])
        if length < FACTS.max_model_len:
            assert submitter.room_after(np.zeros(length, np.int32), "prompt") == FACTS.max_model_len - length
            return
        with pytest.raises(ContextLengthError) as caught:
            submitter.room_after(np.zeros(length, np.int32), "prompt")
        assert f" {length} tokens" in caught.value.message
        assert f" {FACTS.max_model_len} tokens" in caught.value.message


@pytest.mark.parametrize(("ids", "told"), [((), "no tokens"), ((1, -2, 3), "id -2"), ((1, 260), "id 260")])
def test_a_prompt_the_engine_could_not_take_is_refused_by_field(
    pair: RankPair, ids: tuple[int, ...], told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"prompt: .*{told}") as caught:
        submitter_of([pair.rank]).room_after(array(*ids), "prompt")
    assert caught.value.param == "prompt"


async def test_a_full_table_makes_wait_and_a_freed_slot_admits(pair: RankPair) -> None:
    submitter = submitter_of([pair.rank])
    for _ in range(SLOTS):
        await submitter.submit(work_of(1))
    waiting = asyncio.create_task(submitter.submit(work_of(1, 2)))
    await until(lambda: submitter.waiting(0) == (1, 2))
    end_one(pair)
    pair.collector().drain_rest()
    await waiting
    assert (submitter.waiting(0), pair.rank.slots.taken) == ((0, 0), SLOTS)


async def test_prompts_wait_for_the_tokens_given_before_them(pair: RankPair) -> None:
    ahead = STEP_TOKENS * STEPS_AHEAD
    assert pair.rank.has_room(10 * ahead), "a prompt above the bound goes alone"
    pair.rank.promise(1)
    assert pair.rank.has_room(ahead - 1)
    assert not pair.rank.has_room(ahead)
    pair.rank.forget(1)
    assert nothing_held(pair.rank)


async def test_a_full_line_refuses(pair: RankPair) -> None:
    submitter = submitter_of([pair.rank], Limits(requests=0, tokens=100, shared=False))
    for _ in range(SLOTS):
        await submitter.submit(work_of(1))
    with pytest.raises(OverloadedError) as caught:
        await submitter.submit(work_of(1))
    assert caught.value.retry_after_s
    assert pair.rank.load == SLOTS


async def test_a_full_ring_refuses_and_takes_no_slot(pair: RankPair) -> None:
    filler = Submit(0, 0, "filler", bytes(SHAPE.submit_bytes // 4), 1, GREEDY)
    while pair.server.send(filler):
        pass
    with pytest.raises(OverloadedError, match="the submit ring of rank 0 is full"):
        await pair.submit(*[1] * (SHAPE.submit_bytes // 16))
    assert nothing_held(pair.rank)
    pair.commands()
    await pair.submit()
    assert pair.rank.slots.taken == 1


async def test_a_prompt_no_ring_could_hold_takes_no_slot(pair: RankPair) -> None:
    with pytest.raises(MessageTooLargeError):
        await pair.submit(*[1] * (SHAPE.submit_bytes // 4))
    assert nothing_held(pair.rank)


async def test_a_closed_submitter_refuses_at_both_steps_and_tells_who_waits(pair: RankPair) -> None:
    submitter = submitter_of([pair.rank])
    for _ in range(SLOTS):
        await submitter.submit(work_of(1))
    waiting = asyncio.create_task(submitter.submit(work_of(1)))
    await until(lambda: submitter.waiting(0)[0] == 1)
    submitter.close()
    with pytest.raises(ShuttingDownError):
        await waiting
    with pytest.raises(ShuttingDownError):
        submitter.room_after(array(1), "prompt")
    with pytest.raises(ShuttingDownError):
        await submitter.submit(work_of(1))
    assert pair.rank.load == SLOTS


async def test_a_lost_rank_is_not_chosen_and_its_requests_fail(pair: RankPair) -> None:
    stream = await pair.submit()
    assert pair.rank.lose("it died", RankLostError("gone")) == 1
    assert (pair.rank.state, pair.rank.reason, pair.rank.slots.taken) == (RankState.LOST, "it died", 0)
    assert stream.ended
    assert nothing_held(pair.rank)
    with pytest.raises(NotReadyError, match="rank 0 lost"):
        await pair.submit()


async def test_who_waits_before_a_lost_rank_goes_to_another() -> None:
    with rank_pair(index=0) as one, rank_pair(index=1) as two:
        submitter = submitter_of([one.rank, two.rank])
        two.rank.state = RankState.LOADING
        for _ in range(SLOTS):
            await submitter.submit(work_of(1))
        waiting = [asyncio.create_task(submitter.submit(work_of(1, 2))) for _ in range(3)]
        await until(lambda: submitter.waiting(0)[0] == len(waiting))
        two.rank.state = RankState.READY
        one.rank.lose("it died", RankLostError("gone"))
        submitter.rank_lost(one.rank)
        await asyncio.gather(*waiting)
        assert (two.rank.slots.taken, two.rank.pending_tokens) == (3, 6)
        assert nothing_held(one.rank)


async def test_a_cancel_names_the_request_once_and_keeps_its_slot(pair: RankPair) -> None:
    stream = await pair.submit()
    (submit,) = pair.commands()
    assert isinstance(submit, Submit)
    stream.cancel()
    stream.cancel()
    assert pair.commands() == [Cancel(submit.slot, submit.generation)]
    assert pair.rank.slots.taken == 1


async def test_the_prefill_rate_is_measured_between_two_statistics(pair: RankPair) -> None:
    def stats(tokens: int, running: int = 1) -> Stats:
        return Stats(running, 0, 0, 0, 0, 0, prefill_tokens=tokens, decode_tokens=0)

    rank = pair.rank
    rank.measured(stats(1000), 10.0)
    assert rank.prefill_rate == 0
    rank.measured(stats(3000), 12.0)
    assert rank.prefill_rate == 1000
    rank.measured(stats(3000, running=0), 13.0)
    rank.measured(stats(3001), 9000.0)  # neither idleness nor a time that began in it says anything
    assert rank.prefill_rate == 1000
    rank.measured(stats(5001), 9001.0)
    assert rank.prefill_rate == pytest.approx(1000 + (2000 - 1000) * RATE_WEIGHT)
    rank.measured(stats(100), 9002.0)  # a restarted rank counts from zero
    assert rank.prefill_rate > 0


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
