"""The backend `segment`: cut at added tokens, encode each new piece with `tokenizers`, remember its ids.

Exact where `conditions.why_dependent` has no objection. The pieces of resent conversations are found by their text, so
a following turn costs what it added. Needs nothing but `tokenizers`; may be called from several threads.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import HF_INLINE_CHARACTERS, CacheCounts, Ids, ids_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Some hundred long conversations; beyond it the least recently used pieces go, so that text does not fill the memory.
CACHE_BYTES: Final = 512 * 2**20
# A dictionary's and a linked list's share of an entry, so that millions of tiny pieces are counted at their price.
ENTRY_BYTES: Final = 256
ID_BYTES: Final = 4


class SegmentBackend:
    """Remembers the ids of pieces, the least recently used of which go first."""

    name: Final = "segment"
    inline_characters: Final = HF_INLINE_CHARACTERS

    def __init__(self, tokenizer: Tokenizer, added: AddedTokens, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._added = added
        self._limit = cache_bytes
        self._pieces: OrderedDict[str, bytes] = OrderedDict()
        self._counts = CacheCounts()
        self._lock = threading.Lock()

    def encode(self, text: str) -> Ids:
        """See `Backend.encode`."""
        parts: list[str | bytes] = []  # a piece of text, or ids
        done = 0
        for match in self._added.split(text):
            if match.start > done:
                parts.append(text[done : match.start])
            parts.append(match.id.to_bytes(ID_BYTES, "little"))
            done = match.end
        if done < len(text):
            parts.append(text[done:])
        known = self._known({part for part in parts if isinstance(part, str)})
        joined = b"".join(part if isinstance(part, bytes) else known[part] for part in parts)
        return np.frombuffer(joined, "<i4")

    def counts(self) -> CacheCounts:
        """See `Backend.counts`."""
        return self._counts

    def _known(self, pieces: set[str]) -> dict[str, bytes]:
        found = self._look_up(pieces)
        missing = [piece for piece in pieces if piece not in found]
        if missing:
            encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
            made = {
                piece: ids_of(encoding).astype("<i4", copy=False).tobytes()
                for piece, encoding in zip(missing, encodings, strict=True)
            }
            self._store(made)
            found.update(made)
        return found

    def _look_up(self, pieces: Iterable[str]) -> dict[str, bytes]:
        found = {}
        with self._lock:
            for piece in pieces:
                ids = self._pieces.get(piece)
                if ids is None:
                    self._counts.misses += 1
                    continue
                self._counts.hits += 1
                self._pieces.move_to_end(piece)
                found[piece] = ids
        return found

    def _store(self, made: dict[str, bytes]) -> None:
        with self._lock:
            for piece, ids in made.items():
                if piece not in self._pieces:
                    self._counts.bytes += _size(piece, ids)
                self._pieces[piece] = ids
            while self._counts.bytes > self._limit:
                self._counts.bytes -= _size(*self._pieces.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + ENTRY_BYTES
