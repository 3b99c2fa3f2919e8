"""The rival of bench/cache.py: a prefix index as one writes it first, one page after the other in Python.

A page is an object in one dictionary, named by a hash of its parent's name and its tokens, in one order of use. It is
honest: tokens are compared on a hit, what is used is held, and what is held or has children is not evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 128 * 4


@dataclass(slots=True)
class Page:
    """One stored page."""

    ids: bytes
    parent: bytes
    slot: int
    pins: int = 0
    children: int = 0


@dataclass(slots=True)
class Plan:
    """What a request holds."""

    load: list[bytes]
    store: list[bytes]


class NaiveIndex:
    """`num_pages` pages, the one used least recently first."""

    def __init__(self, num_pages: int) -> None:
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._free = list(range(num_pages))

    def look(self, root: bytes, ids: npt.NDArray[np.int32]) -> tuple[list[bytes], list[bytes], int]:
        """Keys and tokens of all whole pages, and how many of them are here."""
        data = ids.tobytes()
        pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data) - PAGE_BYTES + 1, PAGE_BYTES)]
        keys, key = [], root
        for page in pages:
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            keys.append(key)
        found = 0
        for key, page in zip(keys, pages, strict=True):
            known = self._pages.get(key)
            if known is None or known.ids != page:
                break
            found += 1
        return keys, pages, found

    def plan(self, root: bytes, keys: list[bytes], pages: list[bytes], found: int) -> Plan:
        """Hold what was found, make room for the rest and store it."""
        for key in keys[:found]:
            self._pages[key].pins += 1
        while len(self._free) < len(keys) - found:
            self._evict()
        parent = keys[found - 1] if found else root
        for key, page in zip(keys[found:], pages[found:], strict=True):
            self._pages[key] = Page(page, parent, self._free.pop(), pins=1)
            if parent in self._pages:
                self._pages[parent].children += 1
            parent = key
        # The end of a path goes first, so it is the one used first.
        for key in reversed(keys):
            self._pages.move_to_end(key)
        return Plan(keys[:found], keys[found:])

    def done(self, plan: Plan) -> None:
        """Let go of all that a request holds."""
        for key in plan.load + plan.store:
            self._pages[key].pins -= 1

    def _evict(self) -> None:
        for key, page in self._pages.items():
            if not page.pins and not page.children:
                del self._pages[key]
                self._free.append(page.slot)
                if page.parent in self._pages:
                    self._pages[page.parent].children -= 1
                return
