"""Where a conversation's next turn differs from the turns before: the message that costs it its cached prefix.

Remembers a digest of each message of recent conversations, never a text, within a bound. A session may hold several
conversations at once (an agent and its helpers), so a turn is compared with the one it shares most with.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.fields import Message

# Digests kept in all, 8 bytes each: some thousand conversations of some hundred messages.
MAX_DIGESTS: Final = 2**20
# Of one conversation: a change further down than this is not named.
MAX_MESSAGES: Final = 4096
# Conversations told apart within a session; the longest unused goes first.
MAX_BRANCHES: Final = 4


@dataclass(frozen=True, slots=True)
class Changed:
    """The first message that is not what it was."""

    index: int
    role: str

    def __str__(self) -> str:
        return f"{self.index}:{self.role}"


class Conversations:
    """Digests by session, least recently used first."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._digests = 0
        self._sessions: OrderedDict[bytes, list[array[int]]] = OrderedDict()

    def __len__(self) -> int:
        return self._digests

    def changed(self, session: bytes, messages: Sequence[Message]) -> Changed | None:
        """The first message that differs from the turn before; None for a new conversation, or one that went on."""
        now = array("q", [hash((one.role, one.text, one.name)) for one in messages[:MAX_MESSAGES]])
        branches = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        best = max(branches, key=lambda before: _shared(before, now), default=None)
        at = 0 if best is None else _shared(best, now)
        differs = best is not None and at < min(len(best), len(now))
        self._remember(branches, now, best if best is not None and not differs else None)
        return Changed(at, messages[at].role) if differs else None

    def _remember(self, branches: list[array[int]], now: array[int], goes_on: array[int] | None) -> None:
        """Keep this turn, in the place of the one it goes on from."""
        if goes_on is not None:
            branches.remove(goes_on)
            self._digests -= len(goes_on)
            # A turn that was cut short may grow again along the longer one.
            now = max(now, goes_on, key=len)
        branches.append(now)
        self._digests += len(now)
        if len(branches) > MAX_BRANCHES:
            self._digests -= len(branches.pop(0))
        while self._digests > self._max_digests:
            _, oldest = self._sessions.popitem(last=False)
            self._digests -= sum(map(len, oldest))


def _shared(one: array[int], other: array[int]) -> int:
    """How many messages both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
