"""Time to first token of a prompt whose beginning is cached, against one of which nothing is.

A turn that comes back with a new tail is answered from the device, then from host memory, since a prompt of the same
length has driven it off the device; on two ranks, by a rank that never saw it, while the other one is kept busy. A hit
costs little against the miss that has to come before it, so there are several for each; and each is compared with the
misses next to it, because machines that are shared change their speed from one minute to the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.caching.calls import ANSWER_TOKENS, Calls, Reply
from bench.streaming.server_process import ServerError
from hicache.keys import PAGE_TOKENS

# What is promised of a hit: this share of the factor by which it has less to compute.
NEEDED: Final = 0.6
# Of each kind, for each miss.
HITS: Final = 3
# Of the stream that keeps a rank busy.
BUSY_PROMPT: Final = 16
BUSY_TOKENS: Final = 4000


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompts of one measurement."""

    pages: int  # that a turn shares with the one before
    tails: Sequence[int]  # tokens behind them
    rounds: int

    @property
    def shared(self) -> int:
        """Tokens."""
        return self.pages * PAGE_TOKENS

    @property
    def blocks(self) -> int:
        """Of a device that holds the longest of these prompts with its answer, and beside it no page of another."""
        return self.pages + -(-(max(self.tails) + ANSWER_TOKENS) // PAGE_TOKENS)

    @property
    def busy_blocks(self) -> int:
        """Likewise, and the stream that keeps it busy."""
        return self.blocks + -(-(BUSY_PROMPT + BUSY_TOKENS) // PAGE_TOKENS)


@dataclass(slots=True)
class Times:
    """Replies of one length of tail, in the order of their coming."""

    misses: list[Reply] = field(default_factory=list)
    hits: dict[str, list[tuple[int, Reply]]] = field(default_factory=dict)  # with the number of misses before them

    def hit(self, case: str, reply: Reply) -> None:
        """One that came after all misses of now."""
        self.hits.setdefault(case, []).append((len(self.misses), reply))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each way to hit."""
        return [self._row(case, hits) for case, hits in self.hits.items()]

    def _row(self, case: str, hits: list[tuple[int, Reply]]) -> dict[str, Any]:
        prompt, computed = _size([reply for _, reply in hits])
        ratio = statistics.median(self._beside(number) / reply.ttft_s for number, reply in hits)
        less = prompt / computed
        return {
            "part": "first token",
            "case": case,
            "prompt": prompt,
            "computed": computed,
            "miss ms": statistics.median(reply.ttft_s for reply in self.misses) * 1e3,
            "hit ms": statistics.median(reply.ttft_s for _, reply in hits) * 1e3,
            "faster": ratio,
            "less computed": less,
            "share": ratio / less,
            "as promised": ratio >= NEEDED * less,
        }

    def _beside(self, number: int) -> float:
        """Seconds of a miss about the time of a hit that `number` of them preceded."""
        return statistics.mean(reply.ttft_s for reply in self.misses[number - 1 : number + 1])


def _size(replies: list[Reply]) -> tuple[int, int]:
    (size,) = {(reply.prompt, reply.computed) for reply in replies}
    return size


async def one_rank(calls: Calls, shape: Shape) -> list[dict[str, Any]]:
    """Device and host, on a device of `shape.blocks`. Raises ServerError."""
    rows = []
    await calls.first_token(calls.fresh(PAGE_TOKENS))  # what is slow only once
    for tail in shape.tails:
        times = Times()
        for _ in range(shape.rounds):
            shared, other = calls.fresh(shape.shared), calls.fresh(shape.shared)
            times.misses.append(await _ask(calls, shared, tail))
            for _ in range(HITS):
                times.hit("device", await _ask(calls, shared, tail, device=shape.shared))
            times.misses.append(await _ask(calls, other, tail))
            for _ in range(HITS):
                await calls.first_token([*other, *calls.fresh(max(shape.tails))])  # takes all of the device
                await calls.settled()
                times.hit("host", await _ask(calls, shared, tail, host=shape.shared))
        rows += times.rows()
    return rows


async def other_rank(calls: Calls, shape: Shape) -> list[dict[str, Any]]:
    """A hit on rank 1 of what rank 0 stored; all of rank 1's while rank 0 decodes one stream. Raises ServerError."""
    rows = []
    await calls.first_token(calls.fresh(PAGE_TOKENS))
    for tail in shape.tails:
        times = Times()
        for _ in range(shape.rounds):
            shared = calls.fresh(shape.shared)
            await _ask(calls, shared, tail)
            async with calls.running(calls.fresh(BUSY_PROMPT), BUSY_TOKENS):
                before = await calls.counted()
                times.misses.append(await _ask(calls, calls.fresh(shape.shared), tail, settle=False))
                times.hit("host, other rank", await _ask(calls, shared, tail, host=shape.shared, settle=False))
                after = await calls.counted()
            await calls.idle()
            if after["host_hits_total@1"] - before["host_hits_total@1"] != shape.shared:
                raise ServerError("the request did not go to the other rank")
        rows += times.rows()
    return rows


async def _ask(
    calls: Calls, shared: Sequence[int], tail: int, *, device: int = 0, host: int = 0, settle: bool = True
) -> Reply:
    """Ask with a new tail; so much must be reused."""
    reply = await calls.first_token([*shared, *calls.fresh(tail)])
    if (reply.device, reply.host) != (device, host):
        raise ServerError(f"{device} tokens should come from the device and {host} from the host, but: {reply}")
    if settle:
        await calls.settled()
    return reply
