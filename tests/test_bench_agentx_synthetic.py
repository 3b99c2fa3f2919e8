"""Made traces: every kind of turn is there, the same ones every time, shaped as the corpus they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench.agentx.ceiling import BlockCeiling
from bench.agentx.layout import shared_blocks
from bench.agentx.session import Session, session_of
from bench.agentx.synthetic import BLOCK, IDLE_GAP_S, Options, generate
from bench.agentx.traces import Subagent, Trace, Turn


def turns_of(trace: Trace) -> list[Turn]:
    return [entry for entry in trace.requests if isinstance(entry, Turn)]


def agents_of(trace: Trace) -> list[Subagent]:
    return [entry for entry in trace.requests if isinstance(entry, Subagent)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("turns", [8, 30])
def test_the_first_session_has_every_kind_of_turn(seed: int, turns: int) -> None:
    trace = generate(Options(conversations=1, turns=turns, seed=seed))[0]
    session = session_of(trace)
    main = [step.turn for step in session.conversations[0].steps]
    head = (trace.tool_tokens + trace.system_tokens) // BLOCK
    assert [turn.hash_ids[:head] for turn in turns_of(trace)] == [main[0].hash_ids[:head]] * len(turns_of(trace))
    assert {0, 1} <= {turn.tokens_out for turn in main}
    assert any(turn.tokens_in % BLOCK for turn in main)
    assert any(after.t - before.end >= IDLE_GAP_S - 0.01 for before, after in pairwise(main))
    assert any(after.hash_ids == before.hash_ids for before, after in pairwise(main)), "a retry"
    shares = [shared_blocks(before.hash_ids, after.hash_ids) for before, after in pairwise(main)]
    assert head in shares, "a compaction falls back to the prefix"
    _has_agents(session, trace)


def _has_agents(session: Session, trace: Trace) -> None:
    names = [conversation.name for conversation in session.conversations]
    assert "main:1" in names, "an agent that was recorded flat"
    joined = {one for step in session.conversations[0].steps for one in step.joins}
    assert 0 < len(joined) < len(agents_of(trace)), "agents that are waited for, and others"
    first = turns_of(trace)[0].hash_ids
    assert all(shared_blocks(first, agent.requests[0].hash_ids) > 0 for agent in agents_of(trace)), "a shared prefix"


def test_the_same_options_give_the_same_traces_and_another_seed_others() -> None:
    assert generate(Options(turns=9)) == generate(Options(turns=9))
    assert generate(Options(turns=9)) != generate(Options(turns=9, seed=2))
    # More sessions do not change those before.
    assert generate(Options(conversations=5))[:2] == generate(Options(conversations=2))


def test_lengths_and_pauses_are_those_of_the_corpus() -> None:
    """At full scale, loosely: the draws of some sessions vary by some tenths."""
    traces = generate(Options(conversations=16, turns=65, scale=1.0, seed=3))
    main = [turn for trace in traces for turn in turns_of(trace)]
    steps = [step for trace in traces for step in session_of(trace).conversations[0].steps[1:]]
    assert 120_000 < np.median([turn.tokens_in for turn in main]) < 350_000
    assert 400 < np.median([turn.tokens_out for turn in main]) < 800
    assert 3 < np.median([step.delay for step in steps]) < 8
    assert 60 < np.quantile([step.delay for step in steps], 0.9) < 260
    assert 0.25 < np.mean([bool(agents_of(trace)) for trace in traces]) < 0.7
    output = sum(turn.tokens_out for turn in main)
    assert 0.002 < output / sum(turn.tokens_in for turn in main) < 0.01
    assert 0.96 < _ceiling(traces) < 0.995


def _ceiling(traces: list[Trace]) -> float:
    shared = total = 0
    for trace in traces:
        ceiling = BlockCeiling(BLOCK)
        for turn in turns_of(trace):
            shared += ceiling.shared(turn.hash_ids, turn.tokens_in)
            total += turn.tokens_in
    return shared / total


def test_scale_shortens_prompts_and_answers() -> None:
    large, small = (generate(Options(conversations=6, turns=20, scale=scale)) for scale in (1.0, 0.1))
    for name in ("tokens_in", "tokens_out"):
        sums = [sum(getattr(turn, name) for trace in traces for turn in turns_of(trace)) for traces in (large, small)]
        assert 5 < sums[0] / sums[1] < 20
