"""How much slower running streams decode while other requests have pages stored and loaded all the time.

Two clients make the traffic, one token an answer. One asks prompts that nobody knows: their pages are stored. The other
goes round some conversations with a new tail each: their pages are loaded. What they compute shares steps with the
decodes, so the same tokens have to be computed in the same time with copies and without them:

copies     as fast as they are answered, on a device too small to keep any of it
no cache   in the same rhythm, on a server without one: the same new prompts, and of the conversations the tails alone,
           which is even less work, as they do not look at the pages before them
on device  in the same rhythm, on a device that keeps the conversations: the same work, but nothing is loaded
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from bench.caching.calls import Calls, next_token
from bench.streaming.reading import quantile
from hicache.keys import PAGE_TOKENS

STREAM_PROMPT: Final = 64
# More than a stream gets beside prompts: its length, and the blocks that it may take.
MAX_TOKENS_PER_S: Final = 200
# For the tails and answers of both clients.
SPARE_BLOCKS: Final = 4
# What is promised: the mean time between tokens beside copies against that without a cache.
ALLOWED: Final = 1.15


@dataclass(frozen=True, slots=True)
class Load:
    """The traffic and how long it is watched."""

    streams: int
    new_pages: int  # of a prompt that nobody knows
    conversations: int
    pages: int  # of each of them
    tail: int  # tokens
    window_s: float
    rounds: int

    @property
    def stream_tokens(self) -> int:
        """Of a stream that must not end within a window."""
        return int(self.window_s * MAX_TOKENS_PER_S)

    @property
    def small_device(self) -> int:
        """Blocks for what runs at a time and little else."""
        of_stream = -(-(STREAM_PROMPT + self.stream_tokens) // PAGE_TOKENS)
        return self.streams * of_stream + self.new_pages + self.pages + SPARE_BLOCKS

    @property
    def large_device(self) -> int:
        """Blocks that keep all conversations too, and the new prompts that pass through between two turns of each."""
        return self.small_device + 2 * self.conversations * (self.pages + self.new_pages)

    @property
    def host_pages(self) -> int:
        """Of a pool that keeps all conversations while new prompts pass through it."""
        return 2 * self.large_device


@dataclass(frozen=True, slots=True)
class Window:
    """What one of them showed."""

    seconds: float
    gaps: Sequence[float]  # seconds between two tokens of a stream
    new: int  # requests that were answered
    returning: int
    counted: Mapping[str, float]  # by the cache


@dataclass(slots=True)
class Side:
    """One of the three servers; its returning requests begin with one of the conversations."""

    name: str
    calls: Calls
    conversations: Sequence[Sequence[int]]
    windows: list[Window] = field(default_factory=list)


async def compare(copies: Calls, no_cache: Calls, on_device: Calls, load: Load) -> list[dict[str, Any]]:
    """Windows on the three in turns; a row for each of them. Raises ServerError."""
    talks = [copies.fresh(load.pages * PAGE_TOKENS) for _ in range(load.conversations)]
    sides = [Side("copies", copies, talks), Side("no cache", no_cache, [[]]), Side("on device", on_device, talks)]
    for side in sides:
        for talk in side.conversations:
            await side.calls.first_token([*talk, *side.calls.fresh(load.tail)])
        await side.calls.settled()
    for _ in range(load.rounds):
        first: Window | None = None
        for side in sides:
            side.windows.append(await _window(side, load, first))
            first = first or side.windows[-1]
    return [_row(side, sides[0], load) for side in sides]


async def _window(side: Side, load: Load, like: Window | None) -> Window:
    """`like`: its requests a second; None: as many as are answered."""
    calls, talks = side.calls, itertools.cycle(side.conversations)
    async with _streams(calls, load) as streams:
        before, started = await calls.counted(), time.perf_counter()
        end = started + load.window_s
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(_gaps(stream, end)) for stream in streams]
            new = _traffic(
                calls, lambda: calls.fresh(load.new_pages * PAGE_TOKENS), end, None if like is None else like.new
            )
            rate = None if like is None else like.returning
            old = _traffic(calls, lambda: [*next(talks), *calls.fresh(load.tail)], end, rate)
            sending = [group.create_task(new), group.create_task(old)]
        seconds, after = time.perf_counter() - started, await calls.counted()
    await calls.idle()
    gaps = [gap for task in reading for gap in task.result()]
    counted = {name: value - before[name] for name, value in after.items()}
    return Window(seconds, gaps, sending[0].result(), sending[1].result(), counted)


@asynccontextmanager
async def _streams(calls: Calls, load: Load) -> AsyncIterator[list[aiohttp.StreamReader]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(calls.running(calls.fresh(STREAM_PROMPT), load.stream_tokens))
            for _ in range(load.streams)
        ]


async def _gaps(stream: aiohttp.StreamReader, end: float) -> list[float]:
    found = []
    last = time.perf_counter()
    while last < end:
        await next_token(stream)
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found[1:]  # the first one began before it was looked at


async def _traffic(calls: Calls, prompt: Callable[[], list[int]], end: float, count: int | None) -> int:
    """Ask until `end`, one after the other; not more than `count`, evenly spread. Returns the answers."""
    started, done = time.perf_counter(), 0
    while time.perf_counter() < end and done != count:
        if count is not None:
            await asyncio.sleep(started + done * (end - started) / count - time.perf_counter())
        await calls.first_token(prompt())
        done += 1
    return done


def _row(side: Side, copies: Side, load: Load) -> dict[str, Any]:
    gaps = [gap for window in side.windows for gap in window.gaps]
    seconds = sum(window.seconds for window in side.windows)
    means = [[statistics.mean(window.gaps) for window in one.windows] for one in (copies, side)]
    rise = statistics.median(ours / theirs for ours, theirs in zip(*means, strict=True))
    return {
        "part": "beside copies",
        "case": side.name,
        "streams": load.streams,
        "new/s": sum(window.new for window in side.windows) / seconds,
        "returning/s": sum(window.returning for window in side.windows) / seconds,
        "stored/s": sum(window.counted.get("pages_stored_total", 0) for window in side.windows) / seconds,
        "loaded/s": sum(window.counted.get("pages_loaded_total", 0) for window in side.windows) / seconds,
        "mean ms": statistics.mean(gaps) * 1e3,
        "p50 ms": quantile(gaps, 0.5) * 1e3,
        "p99 ms": quantile(gaps, 0.99) * 1e3,
        "copies are slower by": rise - 1,
        "as promised": rise <= ALLOWED or side.name != "no cache",
    }
