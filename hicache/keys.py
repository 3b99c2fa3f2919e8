"""The name of a page: 16 bytes that follow from its tokens and all before them, beginning at a secret root.

Equal prefixes under one root have equal keys; unequal ones practically never do, and who finds a page by its key
compares tokens all the same. `extend` is native (`csrc/page_keys.hpp`) or its twin; both give the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from hicache.native import load

if TYPE_CHECKING:
    from hicache._keys import extend

__all__ = ["KEY_BYTES", "PAGE_TOKENS", "extend", "root"]

PAGE_TOKENS: Final = 128
KEY_BYTES: Final = 16
# Lengths in front of the parts of a root, so that ("ab", "c") and ("a", "bc") differ.
_LENGTH_BYTES: Final = 8


def root(*parts: bytes) -> bytes:
    """A digest of these parts in this order: where a chain of keys begins. A secret part makes it secret."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(part)
    return digest.digest()


if not TYPE_CHECKING:
    extend = load("hicache._keys", "hicache.keys_py").extend
