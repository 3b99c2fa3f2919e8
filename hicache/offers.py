"""What an ended request offers to store, read from a rank's event and proven.

Promises that keys are what the tokens make them and that each state lies behind one of the pages. Knows nothing about
what is stored already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.buckets import Words, key_words
from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend
from hicache.pages import Ids
from ipc.messages import CacheOffer

ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """Whole pages behind the page `parent`, or behind a root."""

    parent: bytes
    keys: bytes
    pages: Ids  # [pages, 128]
    states: dict[int, int]  # pages of these before a state -> its name

    @classmethod
    def proven(cls, event: CacheOffer) -> Offer:
        """Raises ValueError for one that does not fit itself."""
        if len(event.parent) != KEY_BYTES or len(event.ids) % ID_BYTES:
            raise ValueError(f"a parent of {len(event.parent)} bytes and {len(event.ids)} bytes of ids")
        ids = np.frombuffer(event.ids, np.int32)
        keys, count = extend(event.parent, ids), len(ids) // PAGE_TOKENS
        if not keys or keys != event.keys:
            raise ValueError(f"{len(event.ids)} bytes of ids with keys that are not theirs")
        states = dict(event.states)
        if outside := [pages for pages in states if not 0 < pages <= count]:
            raise ValueError(f"a state behind {outside[0]} of {count} pages")
        return cls(event.parent, keys, ids[: count * PAGE_TOKENS].reshape(count, PAGE_TOKENS), states)

    @property
    def words(self) -> Words:
        """Its keys as numbers."""
        return key_words(self.keys)

    def keys_from(self, page: int) -> bytes:
        """Keys of the pages from that one on."""
        return self.keys[page * KEY_BYTES :]
