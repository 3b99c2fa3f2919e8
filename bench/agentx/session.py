"""A trace as conversations that wait for each other: what a lane replays.

Top-level requests that do not go on from the main conversation (agents whose requests were recorded flat) are told
apart by the blocks they share and by time: a request goes on from the conversation with which it shares most, unless
that one still waits for its answer then, or goes on later from blocks that this request lacks. Promises that waiting
never goes in a circle, whatever the trace. Knows nothing about text or servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import msgspec

from bench.agentx.layout import Span, layouts
from bench.agentx.traces import Subagent, Trace, Turn

MAIN: Final = "main"
# Recorded times are rounded: a turn this little before the end of an answer still followed it.
SLACK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Anchor:
    """A conversation starts `delay` seconds after a step of another one: after its end, or its start."""

    conversation: int
    step: int
    delay: float
    from_start: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One request: `delay` seconds after the one before it, and after the conversations in `joins` have ended."""

    turn: Turn
    spans: tuple[Span, ...]
    delay: float
    joins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Steps one after the other. Without an anchor it starts with the session."""

    name: str
    anchor: Anchor | None
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """One trace. Anchors and joins are indices into `conversations`; the first one is the main one."""

    id: str
    block_size: int
    conversations: tuple[Conversation, ...]

    @property
    def size(self) -> int:
        """How many requests it has."""
        return sum(len(conversation.steps) for conversation in self.conversations)


def session_of(trace: Trace) -> Session:
    """The conversations of a trace."""
    turns = sorted((entry for entry in trace.requests if not isinstance(entry, Subagent)), key=lambda turn: turn.t)
    head = trace.tool_tokens + trace.system_tokens
    conversations, places = _strands(turns, trace.block_size, head, MAIN, 0)
    for number, agent in enumerate(entry for entry in trace.requests if isinstance(entry, Subagent)):
        inner = sorted((_absolute(turn, agent.t) for turn in agent.requests), key=lambda turn: turn.t)
        if not inner:
            continue
        before = max((index for index, turn in enumerate(turns) if turn.t <= agent.t), default=None)
        name = agent.agent_id or f"agent-{number}"
        base = len(conversations)
        found, _ = _strands(inner, trace.block_size, agent.tool_tokens + agent.system_tokens, name, base)
        anchor = None if before is None else _anchor(turns[before], inner[0].t, *places[before])
        conversations += [replace(found[0], anchor=anchor), *found[1:]]
        first = 0 if before is None else before + 1
        after = next((index for index in range(first, len(turns)) if turns[index].t >= agent.end - SLACK_S), None)
        if after is not None:
            _join(conversations, *places[after], range(base, len(conversations)))
    return Session(trace.id, trace.block_size, tuple(conversations))


def _absolute(turn: Turn, start: float) -> Turn:
    return turn if turn.t >= start else msgspec.structs.replace(turn, t=turn.t + start)


def _join(conversations: list[Conversation], index: int, step: int, ended: Sequence[int]) -> None:
    steps = list(conversations[index].steps)
    steps[step] = replace(steps[step], joins=(*steps[step].joins, *ended))
    conversations[index] = replace(conversations[index], steps=tuple(steps))


def _strands(
    turns: Sequence[Turn], block: int, head: int, name: str, base: int
) -> tuple[list[Conversation], list[tuple[int, int]]]:
    """Turns in order of time as conversations, numbered from `base`; and conversation and step of each turn."""
    origins = _origins(turns)
    members: list[list[int]] = []
    places: list[tuple[int, int]] = []
    for index, strand in enumerate(_strand_of_each(turns, [depth for _, depth in origins])):
        if strand == len(members):
            members.append([])
        places.append((base + strand, len(members[strand])))
        members[strand].append(index)
    conversations = []
    for number, indices in enumerate(members):
        first = indices[0]
        origin = origins[first][0]
        anchor = _anchor(turns[origin], turns[first].t, *places[origin]) if first else None
        steps = _steps([turns[index] for index in indices], block, head)
        conversations.append(Conversation(f"{name}:{number}" if number else name, anchor, steps))
    return conversations, places


def _origins(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """For each turn the latest earlier one with which it shares most blocks, and how many; else the one before it."""
    owner: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for index, turn in enumerate(turns):
        # An id stands for its whole prefix, so the last known one decides.
        known = (at for at in range(len(turn.hash_ids) - 1, -1, -1) if turn.hash_ids[at] in owner)
        depth = next(known, -1) + 1
        found.append((owner[turn.hash_ids[depth - 1]] if depth else max(index - 1, 0), depth))
        owner.update(dict.fromkeys(turn.hash_ids, index))
    return found


def _strand_of_each(turns: Sequence[Turn], depths: Sequence[int]) -> list[int]:
    """The number of each turn's conversation; a new one has the next number."""
    last_use = {id_: index for index, turn in enumerate(turns) for id_ in turn.hash_ids}
    ends: list[int] = []  # the last turn of each conversation so far
    found: list[int] = []
    for index, depth in enumerate(depths):
        fits = (number for number, end in enumerate(ends) if _goes_on(turns, end, index, depth, last_use))
        strand = next(fits, len(ends))
        ends[strand : strand + 1] = [index]
        found.append(strand)
    return found


def _goes_on(turns: Sequence[Turn], end: int, index: int, depth: int, last_use: Mapping[int, int]) -> bool:
    """Whether a turn that shares `depth` blocks with earlier ones goes on from the turn `end`."""
    before, turn = turns[end], turns[index]
    shares = before.hash_ids[depth - 1 : depth] == turn.hash_ids[depth - 1 : depth] if depth else True
    needed_later = any(last_use[id_] > index for id_ in before.hash_ids[depth : depth + 1])
    return shares and not needed_later and turn.t >= before.end - SLACK_S


def _anchor(before: Turn, start: float, conversation: int, step: int) -> Anchor:
    from_start = start < before.end
    return Anchor(conversation, step, max(0.0, start - (before.t if from_start else before.end)), from_start)


def _steps(turns: Sequence[Turn], block: int, head: int) -> tuple[Step, ...]:
    delays = [0.0, *(max(0.0, turn.t - before.end) for before, turn in pairwise(turns))]
    return tuple(map(Step, turns, layouts(turns, block, head), delays))
