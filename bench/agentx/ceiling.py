"""How much of a replay's prompts a cache that never forgets could have served.

By block ids: what the traces allow, within one replay of a session. By pages: what a server that keeps whole pages of
`PAGE` tokens could reach on the ids that were really sent, template and markers included; at least one token of a
prompt is always computed. Both take the requests in the order of their sending, as if each were cached at once.
Knows nothing about servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from server.tokenizer.backend import Ids

# The project's own page size; engines with smaller pages can come a little higher.
PAGE: Final = 128


class BlockCeiling:
    """One per replay of a session."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._seen: set[int] = set()

    def shared(self, hash_ids: Sequence[int], tokens_in: int) -> int:
        """Tokens of this prompt that were sent before; remembers its blocks."""
        blocks = next((at for at, id_ in enumerate(hash_ids) if id_ not in self._seen), len(hash_ids))
        self._seen.update(hash_ids)
        return min(blocks * self._size, tokens_in)


class PageCeiling:
    """One per server."""

    def __init__(self, page: int = PAGE) -> None:
        self._page = page
        self._seen: set[bytes] = set()

    def shared(self, ids: Ids) -> int:
        """Tokens of this prompt in pages that were sent before; remembers its pages."""
        keys = list(self._keys(ids))
        known = next((at for at, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys)
        return min(known, (len(ids) - 1) // self._page) * self._page

    def _keys(self, ids: Ids) -> Sequence[bytes]:
        """A digest of each whole page together with all before it."""
        keys, last = [], b""
        for start in range(0, len(ids) - self._page + 1, self._page):
            last = hashlib.blake2b(last + ids[start : start + self._page].tobytes(), digest_size=16).digest()
            keys.append(last)
        return keys
