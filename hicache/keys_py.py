"""The pure-Python twin of `csrc/page_keys.hpp`: the same keys, for tests and machines without a compiler.

Some hundred times slower. The C++ says why the steps are as they are.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

_PAGE_TOKENS: Final = 128
_KEY_BYTES: Final = 16
_LANES: Final = 4
_WORD: Final = (1 << 64) - 1
_LANE_SALT: Final = (
    (0x6A09E667F3BCC908, 0xBB67AE8584CAA73B),
    (0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
    (0x510E527FADE682D1, 0x9B05688C2B3E6C1F),
    (0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
)
_PAIR: Final = struct.Struct("<QQ")

Pair = tuple[int, int]


def _absorb(state: Pair, words: Pair) -> Pair:
    a, b = state[0] ^ words[0], state[1] ^ words[1]
    product = a * b
    low, high = product & _WORD, product >> 64
    return ((low ^ high) + b) & _WORD, ((high + ((low << 32 | low >> 32) & _WORD)) & _WORD) ^ a


def _page_key(parent: Pair, page: memoryview) -> Pair:
    lanes = [((parent[0] + x) & _WORD, parent[1] ^ y) for x, y in _LANE_SALT]
    for at, words in enumerate(_PAIR.iter_unpack(page)):
        lanes[at % _LANES] = _absorb(lanes[at % _LANES], (words[0], words[1]))
    key = parent
    for lane in lanes:
        key = _absorb(key, lane)
    return _absorb(key, _LANE_SALT[0])


def extend(parent: bytes, ids: npt.NDArray[np.int32], /) -> bytes:
    """See `hicache/_keys.pyi`."""
    if len(parent) != _KEY_BYTES:
        raise ValueError(f"parent has {len(parent)} bytes instead of {_KEY_BYTES}")
    if ids.itemsize != 4 or ids.ndim != 1:
        raise ValueError(f"ids have {ids.itemsize} bytes in {ids.ndim} dimensions instead of 4 in one")
    x, y = _PAIR.unpack(parent)
    key = (x, y)
    page_bytes = _PAGE_TOKENS * ids.itemsize
    view = ids.data.cast("B")
    keys = []
    for at in range(0, len(ids) // _PAGE_TOKENS * page_bytes, page_bytes):
        key = _page_key(key, view[at : at + page_bytes])
        keys.append(_PAIR.pack(*key))
    return b"".join(keys)
