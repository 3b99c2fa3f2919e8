"""Where a tokenizer's added tokens stand in a text: the cuts at which `tokenizers` encodes each piece by itself.

Follows its rules: the tokens not marked `normalized` are looked for in the raw text, leftmost first and the longest of
those that start there; the others after them, in what the normalizer makes of each piece in between. A token may take
the whitespace beside it (`lstrip`, `rstrip`). Knows nothing about ids of ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Unicode's White_Space, which Rust's \s and trim mean; Python's isspace also takes U+001C..U+001F.
WHITE_SPACE: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_SPACES: Final = re.compile(f"[{WHITE_SPACE}]*")
# A border is looked for from the end of a text in windows that grow by this factor: it is nearly always near.
FIRST_WINDOW: Final = 4096
WINDOW_GROWTH: Final = 8


class Match(NamedTuple):
    """One added token in a text; the range includes whitespace it takes."""

    start: int
    end: int
    id: int


class AddedTokens:
    """The added tokens of one tokenizer."""

    def __init__(self, backend: Tokenizer) -> None:
        found = backend.get_added_tokens_decoder()
        self.by_id: Final[Mapping[int, AddedToken]] = {id_: token for id_, token in found.items() if token.content}
        self.raw_text: Final = not _changes_text(backend)
        first = {id_: token for id_, token in self.by_id.items() if not token.normalized}
        second = {id_: token for id_, token in self.by_id.items() if token.normalized} if self.raw_text else {}
        self._passes = [_Pass(tokens) for tokens in (first, second) if tokens]
        self._border = spelling_pattern(_clean({**first, **second}.values()))

    def split(self, text: str, allowed: Callable[[Match], bool] | None = None) -> list[Match]:
        """All tokens found in `text`, in order; those that are not `allowed` stay part of the pieces between."""
        found: list[Match] = []
        for one in self._passes:
            found = list(_refined(one, text, found))
        return found if allowed is None else [match for match in found if allowed(match)]

    def last_border(self, text: str, low: int, high: int) -> int | None:
        """The last place in (low, high) at which any text that goes on from there may be cut, or None.

        An added token starts there, and none that starts earlier can reach over it, so looking for it needs no scan
        from the start of the text. `tokenizers` cuts there too, whatever stands on the right; so the ids of the whole
        are the ids of both sides joined.
        """
        if self._border is None:
            return None
        window = FIRST_WINDOW
        end = high
        while end > low:
            start = max(low, high - window)
            last = None
            for match in self._border.finditer(text, start, high):
                last = match.start()
            if last is not None and last > low:
                return last
            end = start
            window *= WINDOW_GROWTH
        return None


class _Pass:
    """One of the two looks at a text."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._tokens = {token.content: (id_, token) for id_, token in tokens.items()}
        pattern = spelling_pattern(self._tokens)
        assert pattern is not None
        self._pattern = pattern

    def matches(self, text: str, start: int, end: int) -> Iterator[Match]:
        done = start
        for match in self._pattern.finditer(text, start, end):
            id_, token = self._tokens[match.group()]
            left, right = match.span()
            if token.lstrip:
                left = done + len(text[done:left].rstrip(WHITE_SPACE))
            if token.rstrip and (spaces := _SPACES.match(text, right, end)):
                right = spaces.end()
            yield Match(left, right, id_)
            done = right


def _refined(one: _Pass, text: str, found: list[Match]) -> Iterator[Match]:
    """`found` and, between them, what this look finds."""
    done = 0
    for match in found:
        yield from one.matches(text, done, match.start)
        yield match
        done = match.end
    yield from one.matches(text, done, len(text))


def description(part: Any) -> dict[str, Any]:
    """A tokenizer's part as its JSON, the public way short of dumping the vocabulary with it."""
    found = json.loads(part.__getstate__())
    assert isinstance(found, dict)
    return found


def _changes_text(backend: Tokenizer) -> bool:
    if backend.normalizer is None:
        return False
    form = description(backend.normalizer)
    return form["type"] != "Sequence" or bool(form["normalizers"])


def _clean(tokens: Iterable[AddedToken]) -> list[str]:
    """Spellings that start a match wherever they stand: no other token's occurrence can begin before and reach in."""
    tokens = list(tokens)
    spellings = [token.content for token in tokens]
    insides = "\0".join(spelling[1:] for spelling in spellings)
    ends = {spelling[at:] for spelling in spellings for at in range(1, len(spelling))}
    stripping = tuple(token.content for token in tokens if token.lstrip)
    return [
        spelling
        for spelling in spellings
        if "\0" not in spelling
        and spelling not in insides
        and not any(spelling[:size] in ends for size in range(1, len(spelling) + 1))
        and not any(other.startswith(spelling) for other in stripping)
    ]


def spelling_pattern(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Finds these spellings, leftmost first and of those that start there the longest; None for no spelling.

    A trie, so that thousands of spellings cost what one costs.
    """
    root: dict[str, Any] = {}
    for spelling in spellings:
        node = root
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_trie_source(root)) if root else None


def _trie_source(node: dict[str, Any]) -> str:
    tail = ""
    while len(node) == 1 and "" not in node:  # a stretch without a choice
        ((character, node),) = node.items()
        tail += re.escape(character)
    branches = [re.escape(character) + _trie_source(child) for character, child in node.items() if character]
    if not branches:
        return tail
    return f"{tail}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
