"""A host pool, a device's rows and the transfer between them: in host memory, and on a card where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.opening import open_transfer
from hicache.pool import HostPool, PoolFiles
from hicache.shape import PoolShape
from hicache.transfer import Ticket, Transfer

BLOCKS: Final = 6
STATE_ROWS: Final = 3
# Rows of both ways on a card: a multiple of 16 bytes for the kernel, and one that only the copy engine can take.
SHAPES: Final = (PoolShape(9, 4096 + 16, 4, 160), PoolShape(7, 1001, 4, 33))

UInt8 = npt.NDArray[np.uint8]
DEVICES: Final = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
)


def slots(*rows: int) -> npt.NDArray[np.uint32]:
    return np.array(rows, np.uint32)


def blocks(*rows: int) -> npt.NDArray[np.int32]:
    return np.array(rows, np.int32)


def noise(shape: tuple[int, int], seed: int) -> UInt8:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Rig:
    """All rows begin as noise; `pages` and `states` are what the device holds now."""

    def __init__(self, device: str, shape: PoolShape, pool: HostPool, faults: str, *, with_states: bool) -> None:
        self.pool = pool
        pool.pages[:], pool.states[:] = noise(pool.pages.shape, 1), noise(pool.states.shape, 2)
        pages, states = noise((BLOCKS, shape.page_bytes), 3), noise((STATE_ROWS, shape.state_bytes), 4)
        environ = {"DEEPINFER_CACHE_FAULTS": faults}
        self.transfer: Transfer
        self._pages: UInt8 | torch.Tensor
        self._states: UInt8 | torch.Tensor
        if device == "cpu":
            self._pages, self._states = pages, states
            self.transfer = open_transfer(pages, states if with_states else None, pool, 2, environ)
            return
        on_card = torch.from_numpy(pages).to(device), torch.from_numpy(states).to(device)
        self._pages, self._states = on_card
        self.transfer = open_transfer(on_card[0], on_card[1] if with_states else None, pool, 2, environ)

    @property
    def pages(self) -> UInt8:
        return _on_host(self._pages)

    @property
    def states(self) -> UInt8:
        return _on_host(self._states)

    def wait(self, ticket: Ticket) -> None:
        while not self.transfer.done(ticket):
            pass


def _on_host(rows: UInt8 | torch.Tensor) -> UInt8:
    if isinstance(rows, np.ndarray):
        return rows
    copied: UInt8 = rows.cpu().numpy()
    return copied


@contextmanager
def rig(
    device: str = "cpu", shape: PoolShape = SHAPES[0], faults: str = "", *, with_states: bool = True
) -> Iterator[Rig]:
    """Closed at the end in the order of an engine's end, so that a view left anywhere fails the test."""
    files = PoolFiles.create()
    pool = files.size(shape)
    try:
        made = Rig(device, shape, pool, faults, with_states=with_states)
        yield made
        made.transfer.close()
        pool.close()
    finally:
        files.close()
