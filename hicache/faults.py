"""A transfer that fails on purpose, for tests of what the cache does then.

DEEPINFER_CACHE_FAULTS="load_error_every=3,flip_byte_every=5" in the environment of a rank turns it on, and the log says
so loudly. Counts calls and pages, draws nothing at random, so that a failing test fails again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.pool import HostPool
from hicache.transfer import Blocks, Slots, Ticket, Transfer, TransferError, UInt64

VARIABLE: Final = "DEEPINFER_CACHE_FAULTS"
POLL_S: Final = 0.001

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, every how many times; 0 is never. Pages and states count alike."""

    load_error_every: int = 0  # loads that fail before a byte is copied
    store_error_every: int = 0  # stores that fail before a byte is copied
    short_copy_every: int = 0  # loads and stores that copy the first half of their rows, then fail
    flip_byte_every: int = 0  # stored pages in which a byte flips once their checksum has been taken

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Faults | None:
        """What the environment asks for. Raises TransferError for what is no such fault."""
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        known = {field.name for field in fields(cls)}
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in known or not number.isdecimal():
                raise TransferError(f"{VARIABLE}={text}: {part!r} is none of {', '.join(sorted(known))} with =<number>")
            found[name] = int(number)
        return cls(**found)


class FaultyTransfer:
    """Another transfer, with faults. Wrong bytes are planted in the host pool itself, as broken memory would."""

    def __init__(self, transfer: Transfer, faults: Faults, pool: HostPool) -> None:
        log.warning("COPIES OF THE HOST CACHE FAIL ON PURPOSE: %s=%s", VARIABLE, faults)
        self._transfer = transfer
        self._faults = faults
        self._host_pages = pool.pages
        self._unsummed: set[int] = set()  # slots that were stored since their last checksum
        self._loads = self._stores = self._copies = self._pages_stored = 0
        self.bytes_per_second = transfer.bytes_per_second

    def load(self, slots: Slots, blocks: Blocks) -> None:
        self._load(self._transfer.load, slots, blocks)

    def store(self, blocks: Blocks, slots: Slots) -> Ticket:
        ticket = self._store(self._transfer.store, blocks, slots)
        self._unsummed.update(slots.tolist())
        return ticket

    def load_states(self, slots: Slots, rows: Blocks) -> None:
        self._load(self._transfer.load_states, slots, rows)

    def store_states(self, rows: Blocks, slots: Slots) -> Ticket:
        return self._store(self._transfer.store_states, rows, slots)

    def done(self, ticket: Ticket) -> bool:
        return self._transfer.done(ticket)

    def page_sums(self, slots: Slots) -> UInt64:
        sums = self._transfer.page_sums(slots)
        for slot in self._unsummed.intersection(slots.tolist()):
            self._unsummed.discard(slot)
            self._pages_stored += 1
            if _falls_on(self._pages_stored, self._faults.flip_byte_every):
                flip_byte(self._host_pages[slot])
        return sums

    def state_sums(self, slots: Slots) -> UInt64:
        return self._transfer.state_sums(slots)

    def close(self) -> None:
        self._host_pages = np.empty((0, 0), np.uint8)
        self._transfer.close()

    def _load(self, load: Callable[[Slots, Blocks], None], slots: Slots, blocks: Blocks) -> None:
        if not len(slots):
            return load(slots, blocks)
        self._loads += 1
        if _falls_on(self._loads, self._faults.load_error_every):
            raise TransferError(f"failed load, as {VARIABLE} says")
        if self._is_short():
            load(slots[: len(slots) // 2], blocks[: len(slots) // 2])
            raise TransferError(f"short load, as {VARIABLE} says")
        return load(slots, blocks)

    def _store(self, store: Callable[[Blocks, Slots], Ticket], blocks: Blocks, slots: Slots) -> Ticket:
        if not len(slots):
            return store(blocks, slots)
        self._stores += 1
        if _falls_on(self._stores, self._faults.store_error_every):
            raise TransferError(f"failed store, as {VARIABLE} says")
        if self._is_short():
            half = store(blocks[: len(slots) // 2], slots[: len(slots) // 2])
            while not self._transfer.done(half):
                time.sleep(POLL_S)
            raise TransferError(f"short store, as {VARIABLE} says")
        return store(blocks, slots)

    def _is_short(self) -> bool:
        self._copies += 1
        return _falls_on(self._copies, self._faults.short_copy_every)


def flip_byte(row: npt.NDArray[np.uint8]) -> None:
    """All bits of the byte in the middle of a row, in place."""
    row[len(row) // 2] ^= np.uint8(0xFF)


def _falls_on(count: int, every: int) -> bool:
    return every > 0 and count % every == 0
