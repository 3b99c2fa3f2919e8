"""Requests to a server under measurement, with what each of them reused.

Prompts are random ids: nothing is alike by chance, and nobody tokenizes. Loopback only.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from bench.streaming.server_process import ServerError

PATH: Final = "/v1/completions"
TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.02
# Ids that the demo's vocabulary and larger ones have, none of them special.
IDS: Final = range(1000, 40_000)
SEED: Final = 1
# Of a request whose first token is wanted: the second one comes from a step of its own.
ANSWER_TOKENS: Final = 2
_SAMPLE: Final = re.compile(r'^deepinfer(?:_hicache)?:(\w+)\{dp_rank="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reply:
    """One request: seconds to its first token, and tokens of its prompt by where they came from."""

    ttft_s: float
    prompt: int
    device: int
    host: int

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine computed."""
        return self.prompt - self.device - self.host


class Calls:
    """A client of one server."""

    def __init__(self, session: aiohttp.ClientSession, ids: Sequence[int] = IDS) -> None:
        self._session = session
        self._ids = ids
        self._draw = random.Random(SEED)

    def fresh(self, count: int) -> list[int]:
        """Ids that were not asked before."""
        return self._draw.choices(self._ids, k=count)

    async def first_token(self, prompt: Sequence[int]) -> Reply:
        """Ask for a short answer. Raises ServerError for what is no good answer."""
        body = {
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        started = time.perf_counter()
        async with self._session.post(PATH, json=body) as answer:
            await _check(answer)
            await next_token(answer.content)
            ttft_s = time.perf_counter() - started
            await answer.read()
            name = answer.headers["X-Request-ID"]
        (told,) = (await self._json(f"/deepinfer/requests/{name}"))["prompts"]
        return Reply(ttft_s, len(prompt), told["cached_device"], told["cached_host"])

    @asynccontextmanager
    async def running(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[aiohttp.StreamReader]:
        """A stream whose first token has come; left when the block is."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        async with self._session.post(PATH, json=body) as answer:
            await _check(answer)
            await next_token(answer.content)
            try:
                yield answer.content
            finally:
                answer.close()

    async def counted(self) -> dict[str, float]:
        """Counters and gauges of the ranks and their cache: their sum, and each rank's as `name@rank`."""
        async with self._session.get("/deepinfer/metrics") as answer:
            samples = _SAMPLE.findall(await answer.text())
        found: dict[str, float] = {}
        for name, rank, value in samples:
            found[name] = found.get(name, 0.0) + float(value)
            found[f"{name}@{rank}"] = float(value)
        return found

    async def settled(self) -> None:
        """Until all that is to be stored is. Raises ServerError."""
        await self._until_none("inflight")

    async def idle(self) -> None:
        """Until nothing runs either. Raises ServerError."""
        await self._until_none("inflight", "slots_used")

    async def _until_none(self, *names: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        counted = await self.counted()
        while any(counted.get(name) for name in names):
            if time.monotonic() > deadline:
                raise ServerError(f"the server does not come to rest: {counted}")
            await asyncio.sleep(POLL_S)
            counted = await self.counted()

    async def _json(self, path: str) -> Any:
        async with self._session.get(path) as answer:
            await _check(answer)
            return await answer.json()


async def next_token(stream: aiohttp.StreamReader) -> None:
    """Read its event; comments, which keep a waiting connection alive, are none."""
    while not (await stream.readuntil(b"\n\n")).startswith(b"data: "):
        pass


async def _check(answer: aiohttp.ClientResponse) -> None:
    if not answer.ok:
        raise ServerError(f"{answer.url}: {answer.status} {await answer.text()}")


@asynccontextmanager
async def calls(address: str, ids: Sequence[int] = IDS) -> AsyncIterator[Calls]:
    """A client with a connection for each request that is under way."""
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(address, timeout=timeout, connector=connector) as session:
        yield Calls(session, ids)
