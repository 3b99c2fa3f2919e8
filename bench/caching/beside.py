"""How much slower running streams decode while other requests have pages stored and loaded all the time.

Two clients make the traffic, one token an answer. One asks prompts that nobody knows: their pages are stored. The other
goes round some conversations with a new tail each: their pages are loaded. What they compute shares steps with the
decodes, so all three servers get the same requests at the same moments, a little slower than the first can answer
(evenly spread, or back to back, the two clients fall into step with each other in another way on each server, and the
median is of steps of another kind):

copies     a device too small to keep any of it
on device  a device that keeps the conversations: the same tokens are computed at the same context, but nothing is
           loaded. This is "off": what a server without a cache would do if it had only as much to compute
no cache   a server without one, and of the conversations the tails alone, or it would compute nothing else: less work
           than the others', whose tails look at the pages before them, and so a comparison that is too hard
"""

from __future__ import annotations

import asyncio
import itertools
import random
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
# Of what the first server answers back to back: the others must not fall behind the same times.
PACE: Final = 0.8
SEED: Final = 1
# What is promised: mean and median time between tokens beside copies against those of the same work without.
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
class Times:
    """When the two clients ask, in seconds from the start of a window; None: as soon as they are answered."""

    new: Sequence[float] | None = None
    returning: Sequence[float] | None = None


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


async def compare(copies: Calls, on_device: Calls, no_cache: Calls, load: Load) -> list[dict[str, Any]]:
    """Windows on the three in turns; a row for each of them. Raises ServerError."""
    talks = [copies.fresh(load.pages * PAGE_TOKENS) for _ in range(load.conversations)]
    sides = [Side("copies", copies, talks), Side("on device", on_device, talks), Side("no cache", no_cache, [[]])]
    for side in sides:
        for talk in side.conversations:
            await side.calls.first_token([*talk, *side.calls.fresh(load.tail)])
        await side.calls.settled()
    fastest, generator = await _window(sides[0], load, Times()), random.Random(SEED)
    for turn in range(load.rounds):
        times = Times(*(_spread(count, load.window_s, generator) for count in (fastest.new, fastest.returning)))
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            side.windows.append(await _window(side, load, times))
    return [_row(side, sides[0], load) for side in sides]


def _spread(count: int, seconds: float, generator: random.Random) -> list[float]:
    """One moment in each of as many equal parts of a window as there are requests: `PACE` of `count`."""
    count = max(1, int(PACE * count))
    return [(part + generator.random()) * seconds / count for part in range(count)]


async def _window(side: Side, load: Load, times: Times) -> Window:
    calls, talks = side.calls, itertools.cycle(side.conversations)
    async with _streams(calls, load) as streams:
        before, started = await calls.counted(), time.perf_counter()
        end = started + load.window_s
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(_gaps(stream, end)) for stream in streams]
            new = _traffic(calls, lambda: calls.fresh(load.new_pages * PAGE_TOKENS), started, end, times.new)
            old = _traffic(calls, lambda: [*next(talks), *calls.fresh(load.tail)], started, end, times.returning)
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


async def _traffic(
    calls: Calls, prompt: Callable[[], list[int]], started: float, end: float, times: Sequence[float] | None
) -> int:
    """Ask one after the other until `end`, not before the given times. Returns the answers."""
    done = 0
    while time.perf_counter() < end and (times is None or done < len(times)):
        if times is not None:
            await asyncio.sleep(started + times[done] - time.perf_counter())
        await calls.first_token(prompt())
        done += 1
    return done


def _row(side: Side, copies: Side, load: Load) -> dict[str, Any]:
    gaps = [gap for window in side.windows for gap in window.gaps]
    seconds = sum(window.seconds for window in side.windows)
    rises = {
        name: statistics.median(
            figure(ours.gaps) / figure(theirs.gaps) for ours, theirs in zip(copies.windows, side.windows, strict=True)
        )
        for name, figure in (("mean", statistics.mean), ("p50", statistics.median))
    }
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
        "copies: mean": rises["mean"] - 1,
        "copies: p50": rises["p50"] - 1,
        "as promised": max(rises.values()) <= ALLOWED or side.name != "on device",
    }
