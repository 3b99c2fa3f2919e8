"""A trace as conversations that wait for each other: what a lane replays.

Top-level requests that do not go on from the main conversation (agents whose requests were recorded flat) are told
apart by the blocks they share and by time: a request goes on from the one with which it shares most, unless another
one shares more with that, or it was sent before that one's answer was complete. Promises that waiting never goes in a
circle, whatever the trace. Knows nothing about text or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    parents = _parents(turns)
    heirs = _heirs(turns, parents)
    members: list[list[int]] = []
    places: list[tuple[int, int]] = []
    for index, (parent, _) in enumerate(parents):
        if index and heirs.get(parent) == index:
            strand = places[parent][0] - base
        else:
            strand = len(members)
            members.append([])
        places.append((base + strand, len(members[strand])))
        members[strand].append(index)
    conversations = []
    for number, strand_turns in enumerate(members):
        first = strand_turns[0]
        parent = parents[first][0]
        anchor = _anchor(turns[parent], turns[first].t, *places[parent]) if first else None
        steps = _steps([turns[index] for index in strand_turns], block, head)
        conversations.append(Conversation(f"{name}:{number}" if number else name, anchor, steps))
    return conversations, places


def _parents(turns: Sequence[Turn]) -> list[tuple[int, int]]:
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


def _heirs(turns: Sequence[Turn], parents: Sequence[tuple[int, int]]) -> dict[int, int]:
    """For each turn the one that goes on from it."""
    best: dict[int, tuple[int, int]] = {}
    for index, (parent, depth) in enumerate(parents):
        follows = index > 0 and turns[index].t >= turns[parent].end - SLACK_S
        if follows and (parent not in best or depth > best[parent][1]):
            best[parent] = index, depth
    return {parent: index for parent, (index, _) in best.items()}


def _anchor(before: Turn, start: float, conversation: int, step: int) -> Anchor:
    from_start = start < before.end
    return Anchor(conversation, step, max(0.0, start - (before.t if from_start else before.end)), from_start)


def _steps(turns: Sequence[Turn], block: int, head: int) -> tuple[Step, ...]:
    delays = [0.0, *(max(0.0, turn.t - before.end) for before, turn in pairwise(turns))]
    return tuple(map(Step, turns, layouts(turns, block, head), delays))
