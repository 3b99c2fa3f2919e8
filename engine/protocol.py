"""What a rank's loop needs of an engine, and nothing else.

Three engines fit it: `fake` (no model), `native` (PyTorch) and, later, DeepInfer. An engine is driven by one
thread and knows token ids, slots and pages; nothing about HTTP, text or tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.pool import HostPool
from ipc.messages import CacheStore, Event, Facts, Stats, Submit


class StartError(RuntimeError):
    """The engine cannot come up with what it was given; the message says what is wrong, and a traceback no more."""


class RequestRefusedError(ValueError):
    """This request can never run here (too long for the pool, an id out of range); others are untouched."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced: token records (`ipc.layout.TOKEN_DTYPE`) and the events that must precede them."""

    records: npt.NDArray[np.void]
    events: list[Event] = field(default_factory=list)


class Engine(Protocol):
    """One model on one device. Not thread-safe: only the loop's thread calls it."""

    @property
    def facts(self) -> Facts:
        """Constant from the first call on."""
        ...

    def add(self, request: Submit) -> None:
        """Queue a request; it takes part from the next step on. Raises RequestRefusedError."""
        ...

    def cancel(self, slot: int, generation: int) -> bool:
        """Drop a request and free all it held. False: it is not here (it ended before)."""
        ...

    def attach(self, pool: HostPool) -> None:
        """Use this host pool from now on; before the first request. Raises LaunchError where it cannot be pinned."""
        ...

    def store(self, command: CacheStore) -> None:
        """Copy offered pages to the host; the answer is among the events of a later step."""
        ...

    def forget(self) -> None:
        """Reuse no block whose page is known now."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything; also copies and events that wait count."""
        ...

    def step(self) -> StepOutput:
        """Run one batch: prompt chunks and decodes. Ends of requests are in the records, their blocks are free."""
        ...

    def stats(self) -> Stats:
        """Gauges and counters of this moment."""
        ...

    def pages(self) -> npt.NDArray[np.uint8] | None:
        """The block pool as host bytes `[num_blocks, page_bytes]`, without a copy; None where it lies on a device."""
        ...

    def close(self) -> None:
        """Give back device memory. The engine is not used afterwards."""
        ...
