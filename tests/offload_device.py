"""A device of a few small blocks with a real host pool, and a sequence on it, for tests of what moves between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from engine.blocks import BlockManager, Int32
from engine.offload import Offload, StateRow
from engine.prefix import Prefix, split
from engine.staging import Staging
from hicache.faults import Faults, FaultyTransfer
from hicache.keys import PAGE_TOKENS, extend
from hicache.pool import PoolFiles
from hicache.shape import PoolShape
from hicache.transfer import CpuTransfer, Transfer
from ipc.messages import CacheOffer, CachePlan

ROOT: Final = b"root of a caller"
PAGE_BYTES: Final = 64
STATE_BYTES: Final = 16
# Of the device: a row for each boundary of the one sequence, and rows for states of those that ended.
STATE_ROWS: Final = 8
STAGED: Final = 3


class Device:
    """Block i holds byte i at first, host page i byte 100 + i."""

    def __init__(self, blocks: int = 12, *, states: bool = False, faults: Faults | None = None) -> None:
        self.files = PoolFiles.create()
        self.pool = self.files.size(PoolShape(16, PAGE_BYTES, 4, STATE_BYTES))
        self.pages = np.repeat(np.arange(blocks, dtype=np.uint8)[:, None], PAGE_BYTES, axis=1)
        self.states = np.zeros((STATE_ROWS + STAGED, STATE_BYTES), np.uint8)
        self.pool.pages[:] = np.arange(100, 116, dtype=np.uint8)[:, None]
        self.pool.states[:] = np.arange(200, 204, dtype=np.uint8)[:, None]
        self.blocks = BlockManager(blocks)
        self.has_states = states
        staging = Staging(STATE_ROWS, STAGED, self._copy_state, first_state=0, window=10 * PAGE_TOKENS)
        self.offload = Offload(self.blocks, staging=staging if states else None)
        transfer = CpuTransfer(self.pages, self.states if states else None, self.pool)
        transfer.bytes_per_second = 1.0  # a step beside decodes moves one page
        self.transfer: Transfer = FaultyTransfer(transfer, faults, self.pool) if faults else transfer
        self.offload.attach(self.transfer, PAGE_BYTES)

    def admit(self, tokens: Int32, plan: CachePlan) -> Admitted:
        return Admitted(self, tokens, plan)

    def answers(self) -> list[Any]:
        """Events so far, offers left out."""
        return [event for event in self.offload.take_events() if not isinstance(event, CacheOffer)]

    def _copy_state(self, at: int, to: int) -> None:
        self.states[to] = self.states[at]

    def close(self) -> None:
        self.offload.detach()
        self.pool.close()
        self.files.close()


class Admitted:
    """A sequence as an engine runs it: shares what it finds, takes the rest, begins."""

    def __init__(self, device: Device, tokens: Int32, plan: CachePlan) -> None:
        self.device = device
        self.tokens = tokens
        prefix = device.offload.open(plan, tokens)
        assert prefix is not None
        self.prefix: Prefix = prefix
        self.admit()

    def admit(self) -> None:
        """In a step beside decodes, which may copy one page."""
        blocks, offload = self.device.blocks, self.device.offload
        offload.pump(decoding=True)
        self.shared = offload.find(self.prefix, self.tokens)
        blocks.share(self.shared)
        self.held = self.shared + [blocks.take() for _ in range(-(-len(self.tokens) // PAGE_TOKENS) - len(self.shared))]
        offload.begin(self.prefix, len(self.shared), np.array(self.held, np.int32), self._state_row())

    def _state_row(self) -> StateRow | None:
        return (lambda pages: pages) if self.device.has_states else None

    def load_to_the_end(self) -> int:
        """Steps beside decodes until it may be computed."""
        steps = 0
        while self.prefix.loading:
            self.device.offload.pump(decoding=True)
            steps += 1
        return steps

    def compute(self) -> None:
        self.device.offload.computed(self.prefix, self.held, self._state_row())

    def end(self) -> None:
        self.device.offload.end(self.prefix, self.tokens, self.held, self._state_row())
        self.leave()

    def leave(self) -> None:
        self.device.offload.close(self.prefix)
        self.device.blocks.give_back(self.held)


def prompt(pages: int, more: int = 1, seed: int = 0) -> Int32:
    """So many whole pages of tokens and some more."""
    return np.random.default_rng(seed).integers(0, 1000, pages * PAGE_TOKENS + more).astype(np.int32)


def plan_of(
    tokens: Int32, number: int = 1, *, load: list[int] | None = None, sums: Any = (), store: list[int] | None = None,
    **fields: Any,
) -> CachePlan:  # fmt: skip
    """A plan for a prompt; slots as lists."""
    return CachePlan(
        number,
        ROOT,
        extend(ROOT, tokens),
        load=np.array(load or [], "<u4").tobytes(),
        load_sums=np.array(sums, "<u8").tobytes(),
        store=np.array(store or [], "<u4").tobytes(),
        **fields,
    )


def keys_of(tokens: Int32) -> list[bytes]:
    """Keys of its whole pages."""
    return split(extend(ROOT, tokens))


@contextmanager
def device_of(**fields: Any) -> Iterator[Device]:
    device = Device(**fields)
    yield device
    assert device.blocks.used == 0
    assert not device.offload.busy
    device.close()


def answers_to_the_end(device: Device) -> list[Any]:
    """Steps beside decodes until nothing is left to copy or to say."""
    events = []
    while device.offload.busy:
        device.offload.pump(decoding=True)
        events += device.answers()
    return events
