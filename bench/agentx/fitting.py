"""Sessions made to fit a server of small context: scaled down, and cut at the turn where a conversation is too long.

Scaling keeps which blocks are shared, because it only makes blocks shorter. Knows nothing about text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Final, TypeVar

import msgspec

from bench.agentx.session import Conversation, Session, Step
from bench.agentx.traces import Subagent, Trace, Turn

Entry = TypeVar("Entry", bound=Turn)

# A block of one token has too few texts to be told apart.
MIN_BLOCK: Final = 2


def scaled(trace: Trace, factor: float) -> Trace:
    """The trace with blocks, prompts and answers `factor` (at most 1) times as long; times are left as they are."""
    block = max(MIN_BLOCK, round(trace.block_size * factor))
    ratio = block / trace.block_size

    def shorter(turn: Entry) -> Entry:
        full, rest = divmod(turn.tokens_in, trace.block_size)
        size = full * block + (max(1, min(block, round(rest * ratio))) if rest else 0)
        answer = max(min(turn.tokens_out, 1), round(turn.tokens_out * ratio))
        return msgspec.structs.replace(turn, tokens_in=size, tokens_out=answer)

    def entry(one: Turn | Subagent) -> Turn | Subagent:
        if not isinstance(one, Subagent):
            return shorter(one)
        return msgspec.structs.replace(one, requests=[shorter(turn) for turn in one.requests], **heads(one))

    def heads(of: Trace | Subagent) -> dict[str, int]:
        return {"tool_tokens": round(of.tool_tokens * ratio), "system_tokens": round(of.system_tokens * ratio)}

    return msgspec.structs.replace(trace, block_size=block, requests=[*map(entry, trace.requests)], **heads(trace))


def fitted(session: Session, fits: Callable[[Step], bool]) -> Session | None:
    """The session without the turns of each conversation from the first that does not fit.

    Conversations that such a turn would have started are gone too. None where nothing is left.
    """
    kept: dict[int, Conversation] = {}
    pending = dict(enumerate(session.conversations))
    while pending:
        ready = [
            index for index, one in pending.items() if one.anchor is None or one.anchor.conversation not in pending
        ]
        for index in ready:
            conversation = pending.pop(index)
            steps = tuple(takewhile(fits, conversation.steps))
            if steps and _anchored(conversation, kept):
                kept[index] = replace(conversation, steps=steps)
    if 0 not in kept:
        return None
    number = {index: at for at, index in enumerate(sorted(kept))}
    return replace(session, conversations=tuple(_renumbered(kept[index], number) for index in sorted(kept)))


def _anchored(conversation: Conversation, kept: dict[int, Conversation]) -> bool:
    anchor = conversation.anchor
    return anchor is None or (anchor.conversation in kept and anchor.step < len(kept[anchor.conversation].steps))


def _renumbered(conversation: Conversation, number: dict[int, int]) -> Conversation:
    anchor = conversation.anchor
    if anchor is not None:
        anchor = replace(anchor, conversation=number[anchor.conversation])
    steps = tuple(
        replace(step, joins=tuple(number[one] for one in step.joins if one in number)) for step in conversation.steps
    )
    return replace(conversation, anchor=anchor, steps=steps)
