"""Which blocks of the device pool are in use, by how many, and which whole pages they still hold.

Promises O(1) allocation and release; a block with a holder is never handed out; a block without one whose page is
known counts as free, stays findable, and is the last to be reused, least recently used first. Knows nothing about
sequences, bytes or devices.

A page is found by its key and proven by its tokens and by the page before it, so two keys that collide are a miss.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.keys import KEY_BYTES, PAGE_TOKENS

Int32 = npt.NDArray[np.int32]

_UNKNOWN: Final = 0  # the stamp of a block whose page nobody can find


class BlockManager:
    """Hands out block numbers `0 .. total-1`. `clear` zeroes spoiled blocks before somebody else gets them.

    Released blocks of unknown content are reused first, so that a pool far larger than the load touches little memory.
    """

    def __init__(self, total: int, clear: Callable[[list[int]], object] = lambda _: None) -> None:
        assert total > 0
        self.total = total
        self._clear = clear
        self._blank = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known blocks without holders, oldest first
        self._spoiled: set[int] = set()
        self._holders = array("q", bytes(total * 8))
        # Every known page has a stamp of its own and the stamp of the page before it, or its root's, which are
        # negative. A stamp is never used twice: behind a page that was forgotten nothing is found.
        self._stamps = array("q", bytes(total * 8))
        self._above = array("q", bytes(total * 8))
        self._last_stamp = self._last_root = 0
        self._roots: dict[bytes, int] = {}
        self._by_key: dict[bytes, int] = {}
        # Committed by the system where touched: 528 bytes a known block.
        self._keys = np.zeros((total, KEY_BYTES), np.uint8)
        self._ids = np.zeros((total, PAGE_TOKENS), np.int32)

    @property
    def free(self) -> int:
        """Number of blocks without a holder."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks with a holder."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Of the free blocks: those whose pages are known."""
        return len(self._idle)

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks have no holder, and so count as free."""
        return sum(not self._holders[block] for block in blocks)

    def take(self) -> int:
        """One free block for new content. The caller has checked `free`."""
        assert self.free, "no free block"
        if self._blank:
            block = self._blank.pop()
        else:
            block = self._idle.popitem(last=False)[0]
            self._forget(block)
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that somebody holds or that were just found."""
        for block in blocks:
            if not self._holders[block]:
                assert block in self._idle, f"block {block} is free and unknown"
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let blocks of one sequence go, in token order: its last page is the first to be reused."""
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} was given back twice"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._rest(block)

    def find(self, root: bytes, keys: Sequence[bytes], ids: Int32) -> list[int]:
        """Blocks of the longest prefix of these pages that is known; `ids` are the tokens of at least all of them."""
        found = self._chain(keys, self._roots.get(root, _UNKNOWN))
        return found[: _leading(self._same(found, ids))]

    def follow(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of these pages that is known, wherever it begins; keys alone decide."""
        first = self._by_key.get(keys[0], -1) if keys else -1
        return self._chain(keys, self._above[first]) if first >= 0 else []

    def know(self, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], ids: Int32) -> None:
        """These blocks hold these whole pages from the first one on. A page that is known already keeps its block."""
        known = [self._by_key.get(key, -1) for key in keys]
        same = self._same(known, ids)
        above = self._root(root)
        for page, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            other = self._by_key.get(key, -1)
            if other < 0 or self._above[other] != above or not same[page]:
                # Whatever else has this key cannot be reached, or collides with it: ours is as good.
                if block in self._spoiled:
                    return
                if other >= 0:
                    self._drop(other)
                self._learn(block, key, above, ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
                other = block
            above = self._stamps[other]

    def spoil(self, blocks: Sequence[int]) -> None:
        """The content is worthless: unknown at once, zeroed when the last holder lets go."""
        for block in blocks:
            assert self._holders[block], f"block {block} has no holder"
            self._forget(block)
            self._spoiled.add(block)

    def forget(self) -> None:
        """Nothing that is known now is found any more."""
        for block in self._by_key.values():
            self._stamps[block] = _UNKNOWN
        self._by_key.clear()
        self._roots.clear()
        self._blank.extend(self._idle)
        self._idle.clear()

    def _chain(self, keys: Sequence[bytes], above: int) -> list[int]:
        """Blocks of the longest run of these pages behind the page with stamp `above`."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key, -1)
            if block < 0 or self._above[block] != above:
                break
            found.append(block)
            above = self._stamps[block]
        return found

    def _rest(self, block: int) -> None:
        if block in self._spoiled:
            self._spoiled.remove(block)
            self._clear([block])
        if self._stamps[block] == _UNKNOWN:
            self._blank.append(block)
        else:
            self._idle[block] = None

    def _same(self, blocks: Sequence[int], ids: Int32) -> npt.NDArray[np.bool_]:
        """Whether each block (-1: any answer) has the tokens of its page."""
        pages = ids[: len(blocks) * PAGE_TOKENS].reshape(-1, PAGE_TOKENS)
        same: npt.NDArray[np.bool_] = (self._ids[np.array(blocks, np.int64)] == pages).all(axis=1)
        return same

    def _root(self, root: bytes) -> int:
        if root not in self._roots:
            self._last_root -= 1
            self._roots[root] = self._last_root
        return self._roots[root]

    def _learn(self, block: int, key: bytes, above: int, ids: Int32) -> None:
        assert self._holders[block], f"block {block} has no holder"
        assert self._stamps[block] == _UNKNOWN, f"block {block} is known as another page"
        self._last_stamp += 1
        self._stamps[block], self._above[block] = self._last_stamp, above
        self._keys[block] = np.frombuffer(key, np.uint8)
        self._ids[block] = ids
        self._by_key[key] = block

    def _drop(self, block: int) -> None:
        """Make a page unknown; its block is blank if nobody holds it."""
        self._forget(block)
        if block in self._idle:
            del self._idle[block]
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        if self._stamps[block] != _UNKNOWN:
            self._stamps[block] = _UNKNOWN
            del self._by_key[self._keys[block].tobytes()]


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first false one."""
    return len(flags) if flags.all() else int(flags.argmin())
