"""The way between blocks on a card and the pinned host pool, on the engine's stream.

Promises the contract of `transfer.Transfer`; completion is a CUDA event. Which way copies rows is chosen at start, for
pages and for states. Whatever the driver refuses is a TransferError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from hicache.pinning import PinnedMemory, PinningError
from hicache.pool import HostPool
from hicache.transfer import PROBE_BYTES, Blocks, Slots, Ticket, TransferError, UInt8, UInt64, host_sums
from hicache.ways import RowList, Way, choose, ways_for

# cudaHostRegisterPortable and cudaHostRegisterMapped: pinned for every context, and readable by kernels.
REGISTER_FLAGS: Final = 1 | 2


class CudaTicket(Ticket):
    """A store whose end an event on the engine's stream marks."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event


class CudaRows:
    """Rows on a card, rows of the host pool, pinned, and the fastest of some ways between them."""

    def __init__(self, on_card: torch.Tensor, on_host: UInt8, ways: list[Way]) -> None:
        """Raises PinningError or RuntimeError."""
        self._on_card = on_card
        self._pinned = PinnedMemory(on_host, _register, _unregister)
        self._on_host = torch.from_numpy(on_host)
        try:
            self._way, self.bytes_per_second = choose(ways, self._on_host, on_card.device, PROBE_BYTES)
        except RuntimeError:
            self.close()
            raise

    def load(self, slots: Slots, blocks: Blocks) -> None:
        """Queue copies to the card. Raises TransferError for rows that do not exist, RuntimeError of the driver."""
        to, at = _checked(blocks, len(self._on_card), "block"), _checked(slots, len(self._on_host), "slot")
        self._copy(self._on_card, to, self._on_host, at)

    def store(self, blocks: Blocks, slots: Slots) -> Ticket:
        """Queue copies to the host. Raises as `load`."""
        to, at = _checked(slots, len(self._on_host), "slot"), _checked(blocks, len(self._on_card), "block")
        self._copy(self._on_host, to, self._on_card, at)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._on_card.device))
        return CudaTicket(event)

    def close(self) -> None:
        """Unpin, and let go of both memories."""
        self._pinned.close()
        self._on_card = self._on_host = torch.empty((0, 0), dtype=torch.uint8)

    def _copy(self, dst: torch.Tensor, to: RowList, src: torch.Tensor, at: RowList) -> None:
        if len(to) != len(at):
            raise TransferError(f"{len(at)} source rows for {len(to)} destination rows")
        if len(np.unique(to)) != len(to):
            raise TransferError("a destination row is named twice")
        if not len(to):
            return
        try:
            self._way.copy(dst, to, src, at)
        except RuntimeError:
            # Rows queued before the failure must not land when somebody else has them.
            torch.cuda.current_stream(self._on_card.device).synchronize()
            raise


class CudaTransfer:
    """`pages` and `states` are uint8 [rows, row_bytes] on one card; used with that card's current stream."""

    def __init__(self, pages: torch.Tensor, states: torch.Tensor | None, pool: HostPool, threads: int = 1) -> None:
        """Pins the whole pool, which takes seconds where it is large. Raises TransferError."""
        self._device = pages.device
        self._host_pages, self._host_states = pool.pages, pool.states
        self._threads = threads
        self._states: CudaRows | None = None
        with self._driver("pin the host pool"):
            self._pages = CudaRows(pages, pool.pages, ways_for(pages.shape[1], self._device))
        self.bytes_per_second = self._pages.bytes_per_second
        if states is None or not len(pool.states):
            return
        try:
            with self._driver("pin the host states"):
                self._states = CudaRows(states, pool.states, ways_for(states.shape[1], self._device))
        except TransferError:
            self.close()
            raise

    def load(self, slots: Slots, blocks: Blocks) -> None:
        with self._driver("load pages"):
            self._pages.load(slots, blocks)

    def store(self, blocks: Blocks, slots: Slots) -> Ticket:
        with self._driver("store pages"):
            return self._pages.store(blocks, slots)

    def load_states(self, slots: Slots, rows: Blocks) -> None:
        with self._driver("load states"):
            self._with_states().load(slots, rows)

    def store_states(self, rows: Blocks, slots: Slots) -> Ticket:
        with self._driver("store states"):
            return self._with_states().store(rows, slots)

    def done(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, CudaTicket)
        with self._driver("finish a store"):
            return bool(ticket.event.query())

    def page_sums(self, slots: Slots) -> UInt64:
        return host_sums(self._host_pages, slots, self._threads)

    def state_sums(self, slots: Slots) -> UInt64:
        return host_sums(self._host_states, slots, self._threads)

    def close(self) -> None:
        with self._driver("end copies"):
            torch.cuda.synchronize(self._device)
        self._pages.close()
        if self._states:
            self._states.close()
        self._host_pages = self._host_states = np.empty((0, 0), np.uint8)

    def _with_states(self) -> CudaRows:
        if self._states is None:
            raise TransferError("there are no state rows")
        return self._states

    @contextmanager
    def _driver(self, what: str) -> Iterator[None]:
        """Calls of the driver, for this transfer's card."""
        try:
            with torch.cuda.device(self._device):
                yield
        except (RuntimeError, PinningError) as error:
            raise TransferError(f"cannot {what}: {error}") from error


def _checked(given: Slots | Blocks, count: int, name: str) -> RowList:
    """The rows as int64, all below `count`. Raises TransferError."""
    found = given.astype(np.int64)
    wrong = found[(found < 0) | (found >= count)]
    if len(wrong):
        raise TransferError(f"{name} {wrong[0]} is not one of {count}")
    return found


def _register(address: int, size: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_FLAGS)))


def _unregister(address: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
