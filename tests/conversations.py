"""Conversations that branch, over engines that share a cache, each turn beside an engine that has none.

A turn resends some beginning of what was said before, cut anywhere, and something new behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.protocol import Engine
from ipc.messages import Finish, Submit
from tests.cache_server import CacheServer

Answer = list[int]
Ask = Callable[[int, list[int]], Submit]
"""Slot and prompt -> the request."""


def answer_alone(engine: Engine, request: Submit) -> Answer:
    """What an engine answers to one request."""
    engine.add(request)
    found: Answer = []
    while engine.has_work():
        found += [int(record["token"]) for record in engine.step().records]
    return found


def run(server: CacheServer, rank: int) -> dict[int, Answer]:
    """Step one engine until nothing is left to do; tokens by slot."""
    found: dict[int, Answer] = {}
    while server.engines[rank].has_work():
        for record in server.step(rank).records:
            assert record["finish"] != Finish.ERROR
            found.setdefault(int(record["slot"]), []).append(int(record["token"]))
    return found


@dataclass
class Talk:
    """One conversation after another; `said` is all that can be branched from."""

    server: CacheServer
    ask: Ask
    vocabulary: int
    seed: int = 0
    said: list[list[int]] = field(default_factory=list)
    device_tokens: int = 0
    host_tokens: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def new_tokens(self, count: int) -> list[int]:
        """Ordinary ids."""
        found: list[int] = self.random.integers(3, self.vocabulary, count).tolist()
        return found

    def prompt(self, cut: int, more: int) -> list[int]:
        """The first `cut` tokens of something said before, and new ones."""
        before = self.said[int(self.random.integers(len(self.said)))] if self.said else []
        return before[:cut] + self.new_tokens(more)

    def turn(self, prompt: list[int], *, reuse: bool = True) -> tuple[Submit, Answer]:
        """Ask one of the engines; what it said is remembered."""
        rank = int(self.random.integers(len(self.server.engines)))
        request = self.ask(0, prompt)
        self.server.submit(rank, request, reuse=reuse)
        answer = run(self.server, rank)[0]
        device, host = self.server.hit(0)
        assert reuse or (device, host) == (0, 0)
        self.device_tokens += device
        self.host_tokens += host
        self.said.append(prompt + answer)
        return request, answer
