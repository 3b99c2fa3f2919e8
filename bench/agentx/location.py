"""Where in a JSON text the value at a path stands, so that an error can name the line. Knows nothing about traces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_VALUE: Final = json.JSONDecoder()


def path_of(pointer: str) -> list[str | int]:
    """The steps of a path such as `$.requests[3].in`."""
    return [int(index) if index else name for name, index in _STEP.findall(pointer)]


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line, from 1, of the deepest value on this path that the (valid) text has."""
    at = _skip(text, 0)
    for step in path:
        found = next((place for key, place in _members(text, at) if key == step), None)
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _members(text: str, at: int) -> Iterator[tuple[str | int, int]]:
    """Key or index of each member of the value at `at`, and where the member starts; none for a plain value."""
    keyed = text[at] == "{"
    if not keyed and text[at] != "[":
        return
    closing = "}" if keyed else "]"
    at, index = _skip(text, at + 1), 0
    while text[at] != closing:
        key: str | int = index
        if keyed:
            key, at = _VALUE.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        yield key, at
        _, at = _VALUE.raw_decode(text, at)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    assert blank is not None  # it matches nothing, too
    return blank.end()
