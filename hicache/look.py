"""What a look into the index found for one prompt: how much can be reused, and why not more.

Arithmetic only; it changes nothing. Knows pages, states and the rules of a model, not ranks or plans in the making.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from hicache.buckets import Slots, key_words
from hicache.index import PageIndex
from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend
from hicache.pages import NO_PARENT, NO_SLOTS, NO_STATE, Ids
from hicache.traces import FirstPages


class Reason(StrEnum):
    """Why no more of a prompt was reused. The values are names of metrics and stay."""

    FULL = "full"  # every whole page was
    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other_namespace"  # its beginning is stored, but for another caller; for the operator's eyes only
    NO_STATE = "no_state_at_boundary"
    KEEP_TOKENS = "capped_by_keep_tokens"  # the model computes the last tokens of a prompt itself
    BEING_STORED = "being_stored"  # by another request, now
    BYPASSED = "bypassed"  # the request asked for it
    OFF = "off"
    DISABLED = "disabled"  # after errors


class Rules(NamedTuple):
    """What a model asks of a hit, in tokens: see `ipc.messages.Facts`."""

    keep_tokens: int
    first_state: int
    state_window: int
    has_states: bool


@dataclass(slots=True)
class Look:
    """One prompt against the index. `Planner.plan` brings it up to date if the index has changed since."""

    root: bytes
    ids: Ids  # [n]
    hint: bytes = b""  # its conversation
    keys: bytes = b""  # of all whole pages
    cached_tokens: int = 0  # can be reused now
    reason: Reason = Reason.NEVER_STORED  # why not more
    waits_for: int | None = None  # the plan that stores what comes next
    twin_tokens: int = 0  # how many more could be reused once it has
    # For the planner: the pages found, whether another plan is storing the next one, and of which index that is true.
    ready: Slots = field(default_factory=lambda: NO_SLOTS, repr=False)
    being_stored: bool = False
    version: int = -1

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.ids) - self.cached_tokens

    @property
    def pages(self) -> Ids:
        """The whole pages, `[pages, 128]`."""
        whole = len(self.ids) // PAGE_TOKENS
        return self.ids[: whole * PAGE_TOKENS].reshape(whole, PAGE_TOKENS)

    def bypass(self) -> None:
        """The request wants nothing reused."""
        self.cached_tokens, self.reason = 0, Reason.BYPASSED
        self.waits_for, self.twin_tokens = None, 0


class Looker:
    """Fills looks from one index."""

    def __init__(self, index: PageIndex, rules: Rules) -> None:
        self._index: Final = index
        self._rules: Final = rules
        self.first_pages: Final = FirstPages()

    def fill(self, look: Look) -> None:
        """Bring `look` up to date. Pages that it has found before are proven, not looked up."""
        index, pages = self._index, look.pages
        if not len(pages):
            # A conversation's short prompt has nothing of what its long one used.
            look.ready, look.version, look.reason = NO_SLOTS, index.version, Reason.FULL
            return
        known = look.ready[: index.proven(look.root, look.ready, pages)]
        look.keys = look.keys or self._keys(look, known)
        more, behind = look.keys[len(known) * KEY_BYTES :], int(known[-1]) if known.size else NO_PARENT
        found, reserved = index.match(look.root, key_words(more), pages[len(known) :], behind)
        ready = np.concatenate([known, found])
        look.ready, look.version = ready, index.version
        hit = self._boundary(ready, len(look.ids), promised=False)
        look.cached_tokens = hit * PAGE_TOKENS
        look.being_stored = bool(reserved.size)
        look.waits_for, look.twin_tokens = None, 0
        if reserved.size:
            both = np.concatenate([ready, reserved])
            later = self._boundary(both, len(look.ids), promised=True)
            if later > hit:
                look.waits_for = int(index.pages.owner[reserved[0]])
                look.twin_tokens = (later - hit) * PAGE_TOKENS
        look.reason = self._reason(look, hit)

    def _keys(self, look: Look, known: Slots) -> bytes:
        """Keys of all whole pages, of which these are `known`."""
        keys = self._index.keys(known)
        return keys + extend(keys[-KEY_BYTES:] or look.root, look.ids[len(known) * PAGE_TOKENS :])

    def _cap(self, tokens: int) -> int:
        """Pages of a prompt of that length that may be reused at most."""
        return max(0, tokens - self._rules.keep_tokens) // PAGE_TOKENS

    def _boundary(self, slots: Slots, tokens: int, *, promised: bool) -> int:
        """Pages of this path that can be reused; with those states, or not, that are only `promised`."""
        most = min(len(slots), self._cap(tokens))
        if not self._rules.has_states:
            return most
        states = self._index.pages.state[slots[:most]]
        for at in np.flatnonzero(states != NO_STATE)[::-1].tolist():
            if promised or self._index.states.is_ready(int(states[at])):
                return int(at) + 1
        return 0

    def _reason(self, look: Look, hit: int) -> Reason:
        found, whole, cap = len(look.ready), len(look.pages), self._cap(len(look.ids))
        if hit == whole:
            return Reason.FULL
        if hit < min(found, cap):
            return Reason.NO_STATE
        if hit == cap:
            return Reason.KEEP_TOKENS
        if look.being_stored:
            return Reason.BEING_STORED
        if key_words(look.keys)[found] in self._index.evicted:
            return Reason.EVICTED
        if not found and self._is_others(look):
            return Reason.OTHER_NAMESPACE
        return Reason.NEVER_STORED

    def _is_others(self, look: Look) -> bool:
        slot = self.first_pages.find(look.pages[0].reshape(-1))
        # Under our own root it would have been found.
        return slot >= 0 and self._index.pages.begins_with(slot, look.pages[0])
