"""Both ends of one rank's link in the test's own process: a ready `Rank` as the server has it, and the engine's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink, ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import Command, Facts, Finish, Flag, Sampling
from server.admission import Admission, Limits
from server.cache import Cache
from server.collect import Collector
from server.metrics import Metrics
from server.rank import REQUESTS_AHEAD, Rank, RankState
from server.route import Router
from server.stream import TokenStream
from server.submit import Submitter
from server.turns import Turns
from server.work import Work

DEADLINE_S: Final = 30.0  # far above what anything takes: a test that gets there has found a hang
POLL_S: Final = 0.001
SHAPE: Final = LinkShape(submit_bytes=1 << 16, event_bytes=1 << 16, token_records=16384)
STEP_TOKENS: Final = 2**20  # so that prompts never wait for one another's tokens, only for slots
SLOTS: Final = 4 + REQUESTS_AHEAD
WIDE: Final = Limits(requests=1000, tokens=2**40, shared=False)
NO_RECORDS: Final = np.empty(0, TOKEN_DTYPE)
FACTS: Final = Facts(
    engine="test", model_type="test", dtype="float32", device="cpu", vocab_size=260, eos_ids=(257,),
    max_model_len=512, max_num_seqs=4, block_size=128, num_blocks=16, page_bytes=1024,
)  # fmt: skip


@dataclass
class RankPair:
    """One rank, and the engine that is not there: the test reads its commands and answers them."""

    rank: Rank
    server: ServerLink
    engine: EngineLink
    metrics: Metrics = field(default_factory=Metrics)
    failures: list[str] = field(default_factory=list)
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = Cache([self.rank])

    async def submit(self, *ids: int, max_tokens: int = 8) -> TokenStream:
        """A request through the real admission."""
        return await submitter_of([self.rank]).submit(work_of(*ids or (1, 2, 3), max_tokens=max_tokens))

    def commands(self) -> list[Command]:
        """What the engine was told since the last call."""
        return self.engine.receive(1000)

    def answer(self, *records: npt.NDArray[np.void]) -> None:
        """Publish records."""
        self.engine.publish(np.concatenate(records), ())

    def collector(self) -> Collector:
        """A collector of this link that is not started yet; needs a running loop."""
        return Collector(self.rank, self.server, self.metrics, self.cache, self.failures.append)


def work_of(*ids: int, max_tokens: int = 8, caller: str = "anonymous", session: bytes = b"") -> Work:
    """A greedy request for that prompt."""
    return Work("r", caller, session, np.array(ids, np.int32), max_tokens, Sampling(seed=1, temperature=0))


def submitter_of(ranks: Sequence[Rank], limits: Limits = WIDE, cache: Cache | None = None) -> Submitter:
    """The way into these ranks, wired as the server does it; without a cache it is off."""
    admission = Admission(ranks, limits)
    for rank in ranks:
        rank.on_room = admission.advance
    return Submitter(ranks, Router(ranks, admission.waiting, affinity=True), admission, cache or Cache(ranks), Turns())


@contextmanager
def rank_pair(seqs: int = 4, index: int = 0, shape: LinkShape = SHAPE) -> Iterator[RankPair]:
    """A pair with empty rings, whose rank runs `seqs` sequences and so has SLOTS slots for the default."""
    server = ServerLink.create(shape)
    engine = EngineLink.attach(server.fds, shape)
    rank = Rank(index, seqs, STEP_TOKENS)
    rank.state, rank.facts, rank.link = RankState.READY, FACTS, server
    try:
        yield RankPair(rank, server, engine)
    finally:
        rank.link = None
        engine.close()
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        # What is waited for is the server's own, which sets no event of the test's.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def record(
    slot: int,
    generation: int,
    token: int | None = None,
    *,
    finish: int = Finish.NONE,
    position: int = 0,
    flags: int = 0,
) -> npt.NDArray[np.void]:
    """One token record; without a token it only ends the request."""
    found = np.zeros(1, TOKEN_DTYPE)
    found["slot"], found["generation"], found["finish"], found["position"] = slot, generation, finish, position
    found["flags"] = flags | (0 if token is None else Flag.TOKEN)
    found["token"] = token or 0
    found["time_ns"] = 1  # 0 would mean that none has come yet
    return found


def tokens(slot: int, generation: int, ids: Sequence[int], finish: int = Finish.NONE) -> npt.NDArray[np.void]:
    """A run of token records; the last one may end the request."""
    found = np.concatenate([record(slot, generation, id_, position=at) for at, id_ in enumerate(ids)])
    found["finish"][-1] = finish
    return found
