"""The server's part of the prefix cache over engines in this process: real planner, real pool, no HTTP.

Every event is checked for what the engines promise of it: one answer to each plan, and none without a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from engine.protocol import Engine, StepOutput
from hicache import plan
from hicache.keys import root
from hicache.plan import Planner, Rules
from hicache.pool import HostPool, PoolFiles
from hicache.shape import PoolShape
from ipc.messages import CacheLoaded, CacheOffer, CacheStored, Event, Submit

ROOT: Final = root(b"secret", b"caller")


class CacheServer:
    """One pool and its planner for some engines: `submit` a request, then `step` until there is no work."""

    def __init__(
        self, engines: Sequence[Engine], pages: int = 256, states: int = 64, *, verify_loads: bool = False
    ) -> None:
        facts = engines[0].facts
        self.engines = engines
        self._files = PoolFiles.create()
        shape = PoolShape(pages, facts.page_bytes, states if facts.state_bytes else 0, facts.state_bytes)
        self.pool = self._files.size(shape)
        self._maps = [HostPool.attach(self._files.fds, shape) for _ in engines]
        for engine, pool in zip(engines, self._maps, strict=True):
            engine.attach(pool)
        rules = Rules(facts.keep_tokens, facts.first_state, facts.state_window, facts.state_bytes > 0)
        self.planner = Planner(plan.PoolShape(*shape), rules, verify_loads=verify_loads)
        self.root = ROOT
        self.loaded: dict[tuple[int, int], CacheLoaded] = {}  # by slot and generation of the request
        self.stored: list[CacheStored] = []
        self._loading: dict[int, tuple[int, int]] = {}
        self._storing: dict[int, int] = {}

    def submit(self, rank: int, request: Submit, *, reuse: bool = True) -> None:
        """Send a request with a plan. Raises what `add` does, the plan withdrawn."""
        ids = np.frombuffer(request.ids, "<i4")
        made = self.planner.plan(rank, self.planner.look(self.root, ids), reuse=reuse)
        try:
            self.engines[rank].add(msgspec.structs.replace(request, cache=made))
        except ValueError:
            self.planner.withdraw(made.plan)
            raise
        self._loading[made.plan] = (request.slot, request.generation)
        if made.store or made.store_states:
            self._storing[made.plan] = rank

    def step(self, rank: int) -> StepOutput:
        """One step of an engine, its events heard."""
        output = self.engines[rank].step()
        self.hear(rank, output.events)
        return output

    def hear(self, rank: int, events: Sequence[Event]) -> None:
        """Take in what an engine says of its plans."""
        for event in events:
            match event:
                case CacheLoaded():
                    self.loaded[self._loading.pop(event.plan)] = event
                    self.planner.loaded(rank, event)
                case CacheStored():
                    assert self._storing.pop(event.plan) == rank
                    self.stored.append(event)
                    self.planner.stored(rank, event)
                case CacheOffer():
                    self._take_offer(rank, event)

    def _take_offer(self, rank: int, event: CacheOffer) -> None:
        command = self.planner.offered(rank, event)
        if command is not None:
            self._storing[command.plan] = rank
            self.engines[rank].store(command)

    def slots(self, prompt: Sequence[int]) -> list[int]:
        """Where the host has the pages of a prompt."""
        found: list[int] = self.planner.look(self.root, np.array(prompt, np.int32)).ready.tolist()
        return found

    def harm(self, *, pages: Sequence[int] = (), states: bool = False) -> None:
        """Flip a bit in these pages of the host, or in every state."""
        self.pool.pages[list(pages), 9] ^= 1
        if states:
            self.pool.states[:, 9] ^= 1

    def hit(self, slot: int) -> tuple[int, int]:
        """Tokens that the request in a slot reused: from the device, from the host."""
        event = self.loaded[slot, 1]
        return event.device_tokens, event.host_tokens

    def forget_devices(self) -> None:
        """From now on only the host has pages."""
        for engine in self.engines:
            engine.forget()

    def reset(self) -> None:
        """As the endpoint does."""
        self.root = root(self.root)
        self.planner.reset()
        self.forget_devices()

    def check_settled(self) -> None:
        """Nothing runs: no question is open, no pin, no reservation, no block is left."""
        assert not self._loading
        assert not self._storing
        assert all(count.inflight == 0 for count in self.planner.counts.values())
        for engine in self.engines:
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def close(self) -> None:
        """Unmap everything."""
        for engine in self.engines:
            engine.close()
        for pool in self._maps:
            pool.close()
        self.pool.close()
        self._files.close()
