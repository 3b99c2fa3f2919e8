"""Spans of a turn -> messages with text, so that equal block ids give equal text and equal tokens.

Promises that the same trace, seed and pass give the same prompt byte for byte, on any machine. The marker at the start
is one for all conversations of a session, and another one each time a session is replayed: what a server has cached of
an earlier replay cannot be hit. Knows nothing about servers or time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from bench.agentx.layout import Span
from bench.agentx.session import Session, Step
from bench.agentx.traces import Turn
from bench.agentx.words import Words

Message = dict[str, str]

MARKER_DIGITS: Final = 12
# Texts of messages that are kept, as the next turn sends them again: those of some hundred long conversations.
CACHED_MESSAGES: Final = 32768


def marker_of(seed: int, session: Session, replay: int) -> str:
    """What names the `replay`-th replay of a session under this seed: 12 hexadecimal digits."""
    return hashlib.sha256(f"{seed}\0{session.id}\0{replay}".encode()).hexdigest()[:MARKER_DIGITS]


class Prompts:
    """Messages of these words."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._text = lru_cache(CACHED_MESSAGES)(self._made_text)

    def messages(self, session: Session, step: Step, marker: str) -> list[Message]:
        """The conversation that a step sends; the marker, if any, opens its first message."""
        found = [{"role": span.role, "content": self._content(session, step.turn, span)} for span in step.spans]
        if marker:
            found[0]["content"] = opening(marker) + found[0]["content"]
        return found

    def _content(self, session: Session, turn: Turn, span: Span) -> str:
        block = session.block_size
        assert span.start % block == 0, "messages begin at block borders"
        first, end = span.start // block, -(-span.end // block)
        names: list[int | str] = list(turn.hash_ids[first:end])
        # Turns without ids have nothing in common; those that end in the same id may be one turn sent twice.
        last = turn.hash_ids[-1] if turn.hash_ids else f"at {turn.t}"
        names += [f"{last} + {at - len(turn.hash_ids)}" for at in range(first + len(names), end)]
        return self._text(session.id, tuple(names), block, span.end - span.start)

    def _made_text(self, session: str, names: Sequence[int | str], block: int, size: int) -> str:
        """Of `size` tokens in blocks that are drawn by the session and their names; the last may be shorter."""
        sizes = (min(block, size - at) for at in range(0, size, block))
        return "".join(map(self._words.block, (f"{session}\0{name}" for name in names), sizes))


def opening(marker: str) -> str:
    """The marker as it stands in a prompt."""
    return f"[rid:{marker}]\n\n"
