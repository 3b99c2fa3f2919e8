"""Which ranges of a rendered conversation were typed by somebody, found without knowing the template.

The conversation is rendered a second time with markers in place of the texts in question. Only if putting the texts
back gives the first rendering, character by character, is the answer used; else there is none. Templates often trim
texts, so a text may come back without the whitespace at its ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from server.tokenizer.prefix import Ranges
from server.tokenizer.template import Message

# Private-use characters around a number; a conversation that contains them is not told apart.
OPEN, CLOSE = "\ue0f0", "\ue0f1"
MARKER: Final = re.compile(f"{OPEN}(\\d+){CLOSE}")
TYPED_FIELDS: Final = ("content", "name", "tool_call_id")


def spans(
    messages: Sequence[Message], text: str, asks: Callable[[str], bool], render: Callable[[list[Message]], str]
) -> Ranges | None:
    """The ranges of `text`, the rendering of `messages`, that hold fields for which `asks`; None: it cannot be told."""
    if OPEN in text:
        return None
    typed: list[str] = []
    marked = [_marked(message, asks, typed) for message in messages]
    return _put_back(render(marked), text, typed)


def asked(messages: Sequence[Message], asks: Callable[[str], bool]) -> bool:
    """Whether there is such a field."""
    return any(asks(value) for message in messages for value in _values(message))


def _values(message: Mapping[str, object]) -> list[str]:
    return [value for name in TYPED_FIELDS if isinstance(value := message.get(name), str)]


def _marked(message: Message, asks: Callable[[str], bool], typed: list[str]) -> Message:
    found = dict(message)
    for name in TYPED_FIELDS:
        value = found.get(name)
        if isinstance(value, str) and asks(value):
            found[name] = f"{OPEN}{len(typed)}{CLOSE}"
            typed.append(value)
    return found


def _put_back(skeleton: str, text: str, typed: Sequence[str]) -> Ranges | None:
    first, *rest = MARKER.split(skeleton)
    if not text.startswith(first):
        return None
    at = len(first)
    found: list[tuple[int, int]] = []
    for number, literal in zip(rest[::2], rest[1::2], strict=True):
        value = typed[int(number)]
        sizes = [
            len(one)
            for one in (value, value.strip(), value.rstrip(), value.lstrip())
            if text.startswith(one, at) and text.startswith(literal, at + len(one))
        ]
        if not sizes:
            return None
        found.append((at, at + sizes[0]))
        at += sizes[0] + len(literal)
    return tuple(found) if at == len(text) else None
