"""The transfer that fits where a rank's blocks are, with the faults that its environment asks for.

Loads torch only for blocks on a card. Knows nothing about how rows are copied.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hicache.faults import Faults, FaultyTransfer
from hicache.pool import HostPool
from hicache.transfer import CpuTransfer, Transfer, UInt8

if TYPE_CHECKING:
    import torch


def open_transfer(
    pages: UInt8 | torch.Tensor,
    states: UInt8 | torch.Tensor | None,
    pool: HostPool,
    threads: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> Transfer:
    """The transfer for where these rows are: numpy arrays in host memory, or tensors on a card.

    With the faults that the environment asks for (`hicache.faults`). Raises TransferError where the pool cannot be
    pinned or the environment makes no sense.
    """
    faults = Faults.of(environ)
    transfer: Transfer
    if isinstance(pages, np.ndarray):
        assert states is None or isinstance(states, np.ndarray)
        transfer = CpuTransfer(pages, states, pool, threads)
    else:
        # By name: only ranks with a card have what it needs.
        transfer = importlib.import_module("hicache.transfer_cuda").CudaTransfer(pages, states, pool, threads)
    return FaultyTransfer(transfer, faults, pool) if faults else transfer
