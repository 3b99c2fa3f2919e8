"""Two ways to copy rows to and from a card, and the choice between them by measuring.

Small rows want one kernel for all of them, large ones the copy engine, which costs the model no processors. Both work
on the current stream. Knows nothing about slots of a pool; lists of rows have been checked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache import kernel

# The kernel gets one of so many processors of the card: enough loads on their way to fill the bus, and a model that
# computes on another stream hardly notices.
PROCESSORS_SHARE: Final = 8
PROBE_TURNS: Final = 3

log = logging.getLogger(__name__)

RowList = npt.NDArray[np.int64]


class Way(Protocol):
    """One way to copy: dst[dst_rows[i]] = src[src_rows[i]], both uint8 [rows, row_bytes], queued on the stream."""

    name: str

    def copy(self, dst: torch.Tensor, dst_rows: RowList, src: torch.Tensor, src_rows: RowList) -> None: ...


class CopyEngine:
    """One copy command a row."""

    name = "copy engine"

    def copy(self, dst: torch.Tensor, dst_rows: RowList, src: torch.Tensor, src_rows: RowList) -> None:
        for to, at in zip(dst_rows.tolist(), src_rows.tolist(), strict=True):
            dst[to].copy_(src[at], non_blocking=True)


class Kernel:
    """One kernel for all rows, which reads and writes pinned memory through its own address."""

    name = "kernel"

    def __init__(self, device: torch.device) -> None:
        """Raises KernelUnavailableError."""
        self._module = kernel.load()
        self._device = device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = max(1, processors // PROCESSORS_SHARE)

    def copy(self, dst: torch.Tensor, dst_rows: RowList, src: torch.Tensor, src_rows: RowList) -> None:
        # Pinned for each call: torch gives the memory to nobody else before the stream has read it.
        lists = torch.empty((2, len(dst_rows)), dtype=torch.int32, pin_memory=True)
        lists.numpy()[:] = dst_rows, src_rows
        on_card = lists.to(self._device, non_blocking=True)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._module.copy_rows(dst, src, on_card, self._blocks, stream)


def ways_for(row_bytes: int, device: torch.device) -> list[Way]:
    """What can be used for rows of that size. The kernel moves 16 bytes at a time."""
    ways: list[Way] = [CopyEngine()]
    if row_bytes % 16:
        return ways
    try:
        ways.append(Kernel(device))
    except kernel.KernelUnavailableError as error:
        log.warning("rows of %d bytes go through the copy engine only: %s", row_bytes, error)
    return ways


def choose(ways: Sequence[Way], host: torch.Tensor, device: torch.device, probe_bytes: int) -> tuple[Way, float]:
    """The way that loads rows of `host` fastest, and its bytes a second. Only reads `host`."""
    count = min(len(host), max(1, probe_bytes // host.shape[1]))
    scratch = torch.empty((count, host.shape[1]), dtype=torch.uint8, device=device)
    speeds = {way.name: scratch.nbytes / _seconds(way, scratch, host) for way in ways}
    best = max(ways, key=lambda way: speeds[way.name])
    found = ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in speeds.items())
    log.info("loads of %d-byte rows by the %s (%s)", host.shape[1], best.name, found)
    return best, speeds[best.name]


def _seconds(way: Way, scratch: torch.Tensor, host: torch.Tensor) -> float:
    """Time on the card of one load of all scratch rows, from rows spread over the pool; the best of a few."""
    order = np.arange(len(scratch))
    spread = order * (len(host) // len(scratch))
    times = []
    for _ in range(PROBE_TURNS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        way.copy(scratch, order, host, spread)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(max(min(times[1:]), 1e-9))  # the first turn also loads the kernel
