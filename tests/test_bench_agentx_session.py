"""Traces -> conversations: who goes on from whom, who waits for whom, which tokens are which message, what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agentx.fitting import MIN_BLOCK, fitted, scaled
from bench.agentx.layout import Span, layouts
from bench.agentx.session import Anchor, Session, session_of
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import Subagent, Trace, Turn

BLOCK = 64


def turn(t: float, ids: Sequence[int], out: int = 10, rest: int = 0, api_time: float = 1.0) -> Turn:
    return Turn(t=t, tokens_in=BLOCK * len(ids) + rest, tokens_out=out, hash_ids=list(ids), api_time=api_time)


def trace(*entries: Turn | Subagent, head: int = 0) -> Trace:
    return Trace(id="x", block_size=BLOCK, hash_id_scope="local", tool_tokens=head, requests=list(entries))


def times(session: Session) -> list[list[float]]:
    return [[step.turn.t for step in conversation.steps] for conversation in session.conversations]


def grown(*news: int) -> list[list[int]]:
    """Prompts of which each has so many blocks more than the one before."""
    return [list(range(sum(news[: at + 1]))) for at in range(len(news))]


def test_turns_that_append_are_one_conversation_with_their_pauses() -> None:
    prompts = grown(4, 3, 2)
    session = session_of(trace(*(turn(5.0 * at, ids) for at, ids in enumerate(prompts))))
    assert times(session) == [[0.0, 5.0, 10.0]]
    assert [step.delay for step in session.conversations[0].steps] == [0.0, 4.0, 4.0]


def test_an_agent_recorded_flat_is_told_apart_and_starts_where_it_did() -> None:
    one, two, three = grown(8, 2, 2)
    agent = [0, 1, 100, 101]
    session = session_of(
        trace(
            turn(0, one), turn(2, two), turn(3.5, agent), turn(5, [*agent, 102]), turn(6, three),
        )
    )  # fmt: skip
    assert times(session) == [[0, 2, 6], [3.5, 5]]
    assert session.conversations[1].anchor == Anchor(0, 1, 0.5, from_start=False)


def test_workers_that_overlap_run_side_by_side() -> None:
    """Each starts while another answers, so none can have waited for it; the session goes on after them."""
    one, two = grown(8, 3)
    workers = [turn(1.2 + 0.1 * at, [0, 1, 60 + at], api_time=3) for at in range(3)]
    session = session_of(trace(turn(0, one), *workers, turn(9, two)))
    assert times(session) == [[0, 9], [1.2], [1.3], [1.4]]
    last = session.conversations[3].anchor
    assert last is not None
    assert (last.conversation, last.step, last.from_start) == (2, 0, True)
    assert last.delay == pytest.approx(0.1)


def test_a_compaction_goes_on_also_beside_an_agent() -> None:
    main, small = list(range(8)), [0, 1, 50, 51]
    assert times(session_of(trace(turn(0, main), turn(4, small), turn(6, [*small, 52])))) == [[0, 4, 6]]
    agent = [turn(1.5, [0, 1, 60]), turn(3.5, [0, 1, 60, 61], api_time=9)]
    turns = [turn(0, main[:6]), agent[0], turn(3, main), agent[1], turn(5, small), turn(14, [0, 1, 60, 61, 62])]
    assert times(session_of(trace(*turns))) == [[0, 3, 5], [1.5, 3.5, 14]]


def test_a_request_without_anything_shared_stands_beside_a_session_that_goes_on() -> None:
    one, two = grown(4, 2)
    assert times(session_of(trace(turn(0, one), turn(2, [70]), turn(4, two)))) == [[0, 4], [2]]
    cleared = session_of(trace(turn(0, one), turn(2, [70]), turn(4, [70, 71])))
    assert times(cleared) == [[0, 2, 4]]


def test_a_retry_stays_in_its_conversation() -> None:
    one, two = grown(3, 2)
    session = session_of(trace(turn(0, one), turn(3, one), turn(6, two)))
    assert times(session) == [[0, 3, 6]]
    assert session.conversations[0].steps[0].spans == session.conversations[0].steps[1].spans


def test_a_turn_waits_for_the_agents_that_ended_before_it() -> None:
    prompts = grown(4, 1, 1, 1)
    agents = [
        Subagent(t=1.5, agent_id="joined", duration_ms=2000, requests=[turn(1.5, [0, 70]), turn(3, [0, 70, 71])]),
        Subagent(t=1.5, agent_id="relative", duration_ms=None, requests=[turn(0.5, [0, 80], api_time=1.0)]),
        Subagent(t=1.5, agent_id="background", duration_ms=9e6, requests=[turn(1.5, [0, 90])]),
    ]
    turns = [turn(4.0 * at, ids) for at, ids in enumerate(prompts)]
    session = session_of(trace(*turns[:1], *agents, *turns[1:]))
    names = [conversation.name for conversation in session.conversations]
    assert names == ["main", "joined", "relative", "background"]
    assert [step.joins for step in session.conversations[0].steps] == [(), (1, 2), (), ()]
    assert [conversation.anchor for conversation in session.conversations[1:]] == [
        Anchor(0, 0, 0.5, from_start=False),
        Anchor(0, 0, 1.0, from_start=False),
        Anchor(0, 0, 0.5, from_start=False),
    ]


turns_strategy = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.integers(0, 6),
        st.integers(0, 4),
        st.integers(0, 63),
        st.integers(0, 200),
        st.none() | st.floats(0, 5),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any: turns cut back and grow again from each other, in any order of time, agents anywhere."""
    fresh = 0
    prompts: list[list[int]] = [[]]

    def drawn() -> list[Turn]:
        nonlocal fresh
        found = []
        for t, kept, new, rest, out, api_time in draw(turns_strategy):
            ids = [*draw(st.sampled_from(prompts))[:kept], *range(fresh, fresh + new)]
            fresh += new
            prompts.append(ids)
            size = max(1, BLOCK * len(ids) + rest)
            found.append(Turn(t=t, tokens_in=size, tokens_out=out, hash_ids=ids, api_time=api_time))
        return found

    entries: list[Turn | Subagent] = list(drawn())
    for _ in range(draw(st.integers(0, 3))):
        agent = Subagent(
            t=draw(st.floats(0, 50)), duration_ms=draw(st.none() | st.floats(0, 50_000)), requests=drawn(),
            tool_tokens=draw(st.integers(0, 100)),
        )  # fmt: skip
        entries.insert(draw(st.integers(0, len(entries))), agent)
    return trace(*entries, head=draw(st.integers(0, 200)))


@given(traces())
def test_every_request_is_replayed_once_and_nobody_waits_in_a_circle(given_trace: Trace) -> None:
    session = session_of(given_trace)
    wanted = [entry for entry in given_trace.requests if isinstance(entry, Turn)]
    inner = [one for entry in given_trace.requests if isinstance(entry, Subagent) for one in entry.requests]
    assert session.size == len(wanted) + len(inner)
    assert _played(session) == session.size


def _played(session: Session) -> int:
    """How many steps can be sent, each when what it waits for is done."""
    at = [0] * len(session.conversations)
    moved = True
    while moved:
        moved = False
        for index, conversation in enumerate(session.conversations):
            anchor = conversation.anchor
            if anchor is not None and at[anchor.conversation] <= anchor.step:
                continue
            while at[index] < len(conversation.steps):
                joins = conversation.steps[at[index]].joins
                if any(at[one] < len(session.conversations[one].steps) for one in joins):
                    break
                at[index] += 1
                moved = True
    return sum(at)


@given(traces())
def test_messages_cover_the_prompt_and_alternate(given_trace: Trace) -> None:
    for conversation in session_of(given_trace).conversations:
        for step in conversation.steps:
            spans = step.spans
            assert (spans[0].start, spans[-1].end) == (0, step.turn.tokens_in)
            assert all(one.end == other.start for one, other in pairwise(spans))
            assert all(span.start % BLOCK == 0 and span.start < span.end for span in spans)
            roles = [span.role for span in spans]
            assert roles[-1] == "user"
            assert "system" not in roles[1:]
            talk = roles[1:] if roles[0] == "system" else roles
            assert talk == (["user", "assistant"] * len(talk))[: len(talk)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 300)), min_size=2, max_size=8), st.integers(0, 300))
def test_a_turn_that_appends_resends_what_was_said(growth: list[tuple[int, int]], head: int) -> None:
    turns = [
        turn(at, ids, out=growth[at][1]) for at, ids in enumerate(grown(*(new for new, _ in growth)))
    ]  # fmt: skip
    for before, after in pairwise(layouts(turns, BLOCK, head)):
        if len(after) > len(before):
            assert after[: len(before)] == before
        else:  # too little was added for an answer and a user: the user's message goes on
            assert after[:-1] == before[:-1]
            assert after[-1].start == before[-1].start


def test_the_answer_is_as_long_as_recorded() -> None:
    first, second = grown(4, 6)
    spans = layouts([turn(0, first, out=130), turn(1, second)], BLOCK, head=100)[1]
    assert spans == (
        Span("system", 0, 128), Span("user", 128, 256), Span("assistant", 256, 448), Span("user", 448, 640),
    )  # fmt: skip


@given(st.floats(0.001, 1), st.integers(0, 3))
def test_scaling_keeps_which_blocks_are_shared(factor: float, seed: int) -> None:
    for whole in generate(Options(conversations=2, turns=9, seed=seed)):
        small = scaled(whole, factor)
        assert MIN_BLOCK <= small.block_size <= whole.block_size
        for one, other in zip(_turns(whole), _turns(small), strict=True):
            assert one.hash_ids == other.hash_ids
            assert len(one.hash_ids) <= -(-other.tokens_in // small.block_size)
            assert other.tokens_in <= one.tokens_in
            assert (other.tokens_out > 0) == (one.tokens_out > 0)
        shapes = [[[span.role for span in step.spans] for one in session_of(of).conversations for step in one.steps]
                  for of in (whole, replace_outs(small, whole))]  # fmt: skip
        assert shapes[0] == shapes[1]


def replace_outs(small: Trace, whole: Trace) -> Trace:
    """With answers of as many blocks as before: rounding may make one more or less."""
    for one, other in zip(_turns(small), _turns(whole), strict=True):
        one.tokens_out = -(-other.tokens_out // whole.block_size) * small.block_size
    return small


def _turns(of: Trace) -> list[Turn]:
    return [one for entry in of.requests for one in (entry.requests if isinstance(entry, Subagent) else [entry])]


def test_a_conversation_is_cut_where_it_stops_fitting_and_so_is_what_it_would_have_started() -> None:
    prompts = grown(2, 2, 2, 2)
    agents = [Subagent(t=1.0 + 4 * at, agent_id=f"a{at}", requests=[turn(1.0 + 4 * at, [0, 90 + at])]) for at in (0, 2)]
    turns = [turn(4.0 * at, ids, out=4) for at, ids in enumerate(prompts)]
    session = session_of(trace(turns[0], agents[0], *turns[1:3], agents[1], turns[3]))
    assert session.size == 6
    cut = fitted(session, lambda step: step.turn.tokens_in <= 4 * BLOCK)
    assert cut is not None
    assert [(one.name, len(one.steps)) for one in cut.conversations] == [("main", 2), ("a0", 1)]
    assert cut.conversations[0].steps[1].joins == (1,)
    assert fitted(session, lambda step: step.turn.tokens_in < 2 * BLOCK) is None


@given(traces(), st.integers(1, 1000))
def test_what_is_cut_can_still_be_replayed(given_trace: Trace, limit: int) -> None:
    cut = fitted(session_of(given_trace), lambda step: step.turn.tokens_in < limit)
    if cut is not None:
        assert _played(cut) == cut.size
        assert all(step.turn.tokens_in < limit for one in cut.conversations for step in one.steps)


@pytest.mark.parametrize("seed", range(3))
def test_made_traces_become_sessions_of_all_their_requests(seed: int) -> None:
    for made in generate(Options(conversations=3, turns=12, seed=seed)):
        session = session_of(made)
        assert _played(replace(session)) == len(_turns(made))
