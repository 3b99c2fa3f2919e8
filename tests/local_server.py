"""The server's HTTP side in the test's own event loop, over real links whose engine ends are the test.

So a test decides when which token comes, reads what the engine is told, and can lower the bounds of a module. All
but processes and signals is the server's own: sockets, admission, collectors, handlers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np
from aiohttp import web

from ipc.messages import Cancel, Finish, Flag, Submit
from server.admission import Admission, Limits
from server.app import build
from server.cache import Cache
from server.config import Config
from server.connection import serve
from server.events import EventWriters
from server.keys import Keys
from server.metrics import Metrics
from server.render import Renderer
from server.route import Router
from server.services import Services
from server.submit import Submitter
from server.tokenizer.encode import Encoder
from server.tokenizer.load import TextTokenizer
from server.turns import Turns
from tests.byte_tokenizer import EOS
from tests.rank_pair import DEADLINE_S, POLL_S, RankPair, rank_pair, record

NAME: Final = "tiny"
BACKLOG: Final = 4096


@dataclass(frozen=True)
class Started:
    """One request as the engine got it; the test answers it."""

    pair: RankPair
    submit: Submit

    def say(self, ids: Sequence[int], finish: Finish = Finish.NONE) -> None:
        """Publish tokens; the last one may end the answer."""
        records = [record(self.submit.slot, self.submit.generation, id_, position=at) for at, id_ in enumerate(ids)]
        if finish is Finish.STOP and ids[-1] == EOS:
            records[-1]["flags"] |= np.uint16(Flag.EOS)
        records[-1]["finish"] = finish
        self.pair.answer(*records)

    def end(self, finish: Finish) -> None:
        """Publish an end without a token."""
        self.pair.answer(record(self.submit.slot, self.submit.generation, finish=finish))


class LocalServer:
    """A listening server whose ranks are pairs."""

    def __init__(self, services: Services, pairs: Sequence[RankPair], runner: web.AppRunner, address: str) -> None:
        self.services = services
        self.pairs = pairs
        self.address = address
        self._runner = runner
        self.cancels: list[Cancel] = []
        self._submits: list[Started] = []

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self.address.rpartition(":")[2])

    def client(self, **given: Any) -> aiohttp.ClientSession:
        """A client of this server."""
        return aiohttp.ClientSession(self.address, timeout=aiohttp.ClientTimeout(DEADLINE_S), **given)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    def metric(self, name: str, **labels: str) -> float:
        """A sample; 0 where it never counted."""
        return self.services.metrics.registry.get_sample_value(f"deepinfer:{name}", labels) or 0.0

    def buffered(self) -> list[int]:
        """Bytes that each connection holds back since its client does not take them."""
        assert self._runner.server is not None
        transports = [one.transport for one in self._runner.server.connections if one.transport is not None]
        return [transport.get_write_buffer_size() for transport in transports]

    async def started(self) -> Started:
        """The next request that reaches an engine."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._submits:
                self.hear()
                await asyncio.sleep(POLL_S)
        return self._submits.pop(0)

    def hear(self) -> None:
        """Take what the engines were told; an engine says of each cancelled request that it has ended."""
        for pair in self.pairs:
            for command in pair.commands():
                if isinstance(command, Submit):
                    self._submits.append(Started(pair, command))
                elif isinstance(command, Cancel):
                    self.cancels.append(command)
                    pair.answer(record(command.slot, command.generation, finish=Finish.CANCELLED))

    async def idle(self) -> None:
        """Until no rank holds or was promised anything."""
        async with asyncio.timeout(DEADLINE_S):
            while any(pair.rank.load or pair.rank.pending_tokens for pair in self.pairs):
                self.hear()
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def local_server(
    tokenizer: TextTokenizer,
    *,
    ranks: int = 1,
    seqs: int = 4,
    keys: Keys | None = None,
    tls: ssl.SSLContext | None = None,
    **config: Any,
) -> AsyncIterator[LocalServer]:
    """A server of `ranks` ready ranks that run `seqs` sequences each; `config` are fields of its Config."""
    async with AsyncExitStack() as stack:
        pairs = [stack.enter_context(rank_pair(seqs, index)) for index in range(ranks)]
        services = services_of(tokenizer, pairs, keys or Keys(), Config(served_model_name=NAME, **config))
        for pair in pairs:
            collector = pair.collector()
            collector.start()
            stack.callback(collector.stop)
        runner = web.AppRunner(
            build(services.config, services), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        listener = socket.create_server(("127.0.0.1", 0))
        server = await serve(runner, listener, tls, BACKLOG)
        stack.callback(server.close)
        yield LocalServer(services, pairs, runner, f"http://127.0.0.1:{listener.getsockname()[1]}")


def services_of(tokenizer: TextTokenizer, pairs: Sequence[RankPair], keys: Keys, config: Config) -> Services:
    """What `server.run` builds, around these ranks."""
    metrics, ranks = Metrics(), [pair.rank for pair in pairs]
    admission = Admission(ranks, Limits(config.max_waiting, config.max_waiting_tokens, shared=keys.required))
    for pair in pairs:
        pair.metrics = metrics
        pair.rank.on_room = admission.advance
    cache, turns = Cache(ranks), Turns()
    submitter = Submitter(ranks, Router(ranks, admission.waiting, affinity=True), admission, cache, turns)
    metrics.watch(ranks, submitter.waiting)
    return Services(
        config, tokenizer, Encoder(tokenizer), Renderer(tokenizer, config.thinking_mode), EventWriters(tokenizer), keys,
        ranks, submitter, metrics, cache, turns,
    )  # fmt: skip


def ids_of(started: Started) -> list[int]:
    """The prompt that the engine got."""
    return [int(id_) for id_ in np.frombuffer(started.submit.ids, "<i4")]
