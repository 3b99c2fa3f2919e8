"""Which tokens of a turn's prompt are which message, so that a conversation is resent as agents resend theirs.

Promises for every turn: the spans cover its prompt in order, begin at block borders, alternate between user and
assistant after an optional system message and end with the user; and a turn that only appends resends all earlier
messages as they were. Knows nothing about text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.agentx.traces import Turn


class Span(NamedTuple):
    """Tokens `start` to `end` of a prompt are one message."""

    role: str
    start: int
    end: int


def layouts(turns: Sequence[Turn], block: int, head: int) -> list[tuple[Span, ...]]:
    """The messages of each turn of one conversation. `head` tokens, in whole blocks, are the system message."""
    found: list[tuple[Span, ...]] = []
    for index, turn in enumerate(turns):
        spans = _next(found[-1], turns[index - 1], turn, block) if found else _first(turn.tokens_in, block, head)
        found.append(_alternating(spans))
    return found


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists have in common at their beginning."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(at for at in range(size) if one[at] != other[at])


def _first(size: int, block: int, head: int) -> list[Span]:
    # At least one token is left to the user.
    system = min(-(-head // block), (size - 1) // block) * block
    spans = [Span("system", 0, system)] if system else []
    return [*spans, Span("user", system, size)]


def _next(spans: tuple[Span, ...], before: Turn, turn: Turn, block: int) -> list[Span]:
    size = turn.tokens_in
    if turn.hash_ids == before.hash_ids and size == before.tokens_in:
        return list(spans)
    shared = shared_blocks(before.hash_ids, turn.hash_ids)
    kept = min(shared * block, before.tokens_in, size)
    if kept < size:
        kept -= kept % block
    resent = _cut(spans, kept)
    answer = 0
    if resent and resent[-1].role == "user" and shared == len(before.hash_ids):
        # Only appended to: what follows first is the answer.
        answer = max(0, min(-(-before.tokens_out // block), (size - kept - 1) // block)) * block
    added = [Span("assistant", kept, kept + answer), Span("user", kept + answer, size)]
    return [*resent, *(span for span in added if span.start < span.end)]


def _cut(spans: Sequence[Span], size: int) -> list[Span]:
    return [span._replace(end=min(span.end, size)) for span in spans if span.start < size]


def _alternating(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The last one becomes the user's, and neighbours of one role become one message."""
    merged: list[Span] = []
    for span in [*spans[:-1], spans[-1]._replace(role="user")]:
        if merged and merged[-1].role == span.role:
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return tuple(merged)
