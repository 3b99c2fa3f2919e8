"""Spans of a turn -> messages with text, so that equal block ids give equal text and equal tokens.

Promises that the same trace, seed and pass give the same prompt byte for byte, on any machine. The marker at the start
is one for all conversations of a session, and another one each time a session is replayed: what a server has cached of
an earlier replay cannot be hit. Knows nothing about servers or time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from bench.agentx.layout import Span
from bench.agentx.session import Session, Step
from bench.agentx.traces import Turn
from bench.agentx.words import Words

Message = dict[str, str]

MARKER_DIGITS: Final = 12


def marker_of(seed: int, session: Session, replay: int) -> str:
    """What names the `replay`-th replay of a session under this seed: 12 hexadecimal digits."""
    return hashlib.sha256(f"{seed}\0{session.id}\0{replay}".encode()).hexdigest()[:MARKER_DIGITS]


def messages_of(words: Words, session: Session, step: Step, marker: str) -> list[Message]:
    """The conversation that a step sends; the marker opens its first message."""
    texts = [_text(words, session, step.turn, span) for span in step.spans]
    messages = [{"role": span.role, "content": text} for span, text in zip(step.spans, texts, strict=True)]
    if marker:
        messages[0]["content"] = f"[rid:{marker}]\n\n{messages[0]['content']}"
    return messages


def _text(words: Words, session: Session, turn: Turn, span: Span) -> str:
    size = session.block_size
    assert span.start % size == 0, "messages begin at block borders"
    keys = _keys(session, turn, span)
    return "".join(
        words.block(key, min(size, span.end - at))
        for key, at in zip(keys, range(span.start, span.end, size), strict=True)
    )


def _keys(session: Session, turn: Turn, span: Span) -> Iterator[str]:
    """What the text of each block of a span is drawn by: its id, or its place behind the last id."""
    ids = turn.hash_ids
    # Turns without ids have nothing in common; those that end in the same id may be one turn sent twice.
    end = str(ids[-1]) if ids else f"at {turn.t}"
    for index in range(span.start // session.block_size, -(-span.end // session.block_size)):
        name = str(ids[index]) if index < len(ids) else f"{end} + {index - len(ids)}"
        yield f"{session.id}\0{name}"
