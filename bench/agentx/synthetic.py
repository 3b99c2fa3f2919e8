"""Traces made by a seed, shaped like the public corpus of recorded coding sessions, scaled down.

Promises the same traces for the same options, and that a first session of eight turns or more has every kind of turn a
replay must cope with: sub-agents waited for and in the background, an agent recorded flat, a compaction, a retry, an
idle gap, answers of 0 and 1 token, a prompt that ends within a block. Knows nothing about text or servers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Final

import msgspec

from bench.agentx.errors import OptionError
from bench.agentx.traces import Subagent, Trace, Turn

BLOCK: Final = 64
MODEL: Final = "synthetic"

# Of the corpus, at scale 1: median and the ratio of the 90th percentile (or the mean) to it give log-normal draws.
NEW_TOKENS: Final = (1664.0, 1.28)  # a turn's prompt beyond the one before: mean 3,792
OUT_TOKENS: Final = (616.0, 1.27)  # mean 1,374, 90 % below 3,502
IDLE_S: Final = (4.9, 2.57)  # 90 % below 131.5 s
TURNS_SIGMA: Final = 1.27  # 90 % of the sessions have less than five times the median
FEWEST_TURNS: Final = 0.3  # of the median: shorter sessions are not in the corpus
MOST_TURNS: Final = 5.0
AGENT_SESSIONS: Final = 0.445  # have sub-agents,
AGENT_GROUPS: Final = 4  # so many,
AGENT_TURNS: Final = 0.25  # with so many requests each for one of the session's,
AGENT_PROMPT: Final = (24_000.0, 0.8)  # which begin with so many tokens
BACKGROUND: Final = 0.2  # nobody waits for them
FIRST_PROMPT: Final = (8000.0, 1.0)
IDLE_GAP_S: Final = 30.0

# An agent shares the beginning of the session's tools, in blocks.
AGENT_HEAD: Final = 4
SPAWN_S: Final = 0.05
RETRY_S: Final = 1.0
# A summary is so much shorter than what it stands for.
COMPACTED: Final = 5

# Of an unloaded server: what `api_time` says does not change what is sent, only when.
TTFT_S: Final = 0.3
TOKEN_S: Final = 0.01

# What may be special about a turn, and how often it is; in the first session each is so once.
KINDS: Final = {
    "retry": 0.02,
    "flat agent": 0.02,
    "compaction": 0.004,
    "idle gap": 0.02,
    "out 0": 0.01,
    "out 1": 0.02,
    "uneven": 0.1,
}


@dataclass(frozen=True, slots=True)
class Options:
    """`--synthetic conversations=..,turns=..,scale=..`. Raises OptionError."""

    conversations: int = 2
    turns: int = 8  # median
    scale: float = 0.01  # lengths, against the corpus
    prefix: int = 24_000  # tokens of tools and system at scale 1
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("conversations", "turns"):
            if getattr(self, name) < 1:
                raise OptionError(f"--synthetic {name}={getattr(self, name)}: must be above 0")
        if not 0 < self.scale <= 10:
            raise OptionError(f"--synthetic scale={self.scale}: must be above 0 and at most 10")
        if self.prefix < 0:
            raise OptionError(f"--synthetic prefix={self.prefix}: must not be negative")

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Options:
        """Of `name=value,...`. Raises OptionError."""
        values: dict[str, float | int] = {}
        kinds = {"conversations": int, "turns": int, "scale": float, "prefix": int, "seed": int}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise OptionError(f"--synthetic {part}: one of {', '.join(kinds)} is expected")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise OptionError(f"--synthetic {part}: {value!r} is no {kinds[name].__name__}") from None
        return cls(**values)  # type: ignore[arg-type]


def generate(options: Options) -> list[Trace]:
    """The traces."""
    return [_Writer(options, number).trace() for number in range(options.conversations)]


@dataclass(slots=True)
class _Thread:
    """A conversation so far: its blocks, of which the first `head` are tools and system, and its last answer."""

    ids: list[int]
    head: int
    out: int = 0
    turns: int = 0


class _Writer:
    """Writes one session, turn after turn."""

    def __init__(self, options: Options, number: int) -> None:
        self._scale = options.scale
        self._median_turns = options.turns
        self._number = number
        self._draw = random.Random(f"{options.seed} {number}")
        self._fresh = 0
        self._time = 0.0
        self._head = _blocks(options.prefix * options.scale)
        self._entries: list[Turn | Subagent] = []

    def trace(self) -> Trace:
        """The whole session."""
        main = self._thread(self._new(self._head), FIRST_PROMPT)
        count = self._turn_count()
        agents = self._agents_after(count)
        for turn in range(count):
            kinds = self._kinds(turn, count)
            self._entries.append(self._turn(main, kinds, last=turn == count - 1))
            if "retry" in kinds:
                self._entries.append(self._retry())
            if "flat agent" in kinds:
                self._flat_agent(main)
            if groups := agents.count(turn):
                self._agents(main, groups, waited_for=self._draw.random() >= BACKGROUND)
            self._go_on(main, kinds)
        tools = 2 * self._head * BLOCK // 3
        return Trace(
            id=f"synthetic-{self._number:04d}", models=[MODEL], block_size=BLOCK, hash_id_scope="local",
            tool_tokens=tools, system_tokens=self._head * BLOCK - tools,
            requests=sorted(self._entries, key=lambda entry: entry.t),
        )  # fmt: skip

    def _turn_count(self) -> int:
        median = self._median_turns
        if self._number == 0:
            return median
        drawn = self._lognormal(median, TURNS_SIGMA)
        return max(1, round(min(max(drawn, FEWEST_TURNS * median), MOST_TURNS * median)))

    def _agents_after(self, count: int) -> list[int]:
        """The turns after which sub-agents start, once for each of them."""
        if self._number == 0:
            return [count // 2, count // 2, count - 1]
        if self._draw.random() >= AGENT_SESSIONS:
            return []
        return [self._draw.randrange(count) for _ in range(max(1, min(AGENT_GROUPS, count // 3)))]

    def _kinds(self, turn: int, count: int) -> set[str]:
        """What is special about a turn."""
        if self._number == 0:
            return {kind for place, kind in enumerate(KINDS) if turn == (place + 1) % count}
        return {kind for kind, share in KINDS.items() if self._draw.random() < share}

    def _thread(self, head: list[int], first: tuple[float, float]) -> _Thread:
        return _Thread(head + self._new(_blocks(self._lognormal(*first) * self._scale)), len(head))

    def _turn(self, thread: _Thread, kinds: AbstractSet[str] = frozenset(), *, last: bool = False) -> Turn:
        """The next request of a thread, now; the time moves to the end of its answer."""
        thread.out = max(2, round(self._lognormal(*OUT_TOKENS) * self._scale))
        thread.out = 0 if "out 0" in kinds else 1 if "out 1" in kinds else thread.out
        uneven = self._draw.randrange(1, BLOCK) if "uneven" in kinds else 0
        turn = Turn(
            t=round(self._time, 3), model=MODEL, tokens_in=BLOCK * len(thread.ids) + uneven, tokens_out=thread.out,
            hash_ids=list(thread.ids), input_types=["tool_result" if thread.turns else "text"], output_types=["text"],
            stop="end_turn" if last else "tool_use", api_time=round(TTFT_S + TOKEN_S * thread.out, 3),
        )  # fmt: skip
        thread.turns += 1
        self._time = turn.end
        return turn

    def _retry(self) -> Turn:
        """The last request again, as if its answer got lost."""
        before = self._entries[-1]
        assert isinstance(before, Turn)
        again = msgspec.structs.replace(before, t=round(before.end + RETRY_S, 3))
        self._time = again.end
        return again

    def _go_on(self, thread: _Thread, kinds: AbstractSet[str] = frozenset()) -> None:
        """Append the answer and what the tools said, or start over from the prefix; and let time pass."""
        if "compaction" in kinds:
            thread.ids = thread.ids[: thread.head] + self._new(1 + (len(thread.ids) - thread.head) // COMPACTED)
        answer = -(-thread.out // BLOCK)
        new = _blocks(self._lognormal(*NEW_TOKENS) * self._scale)
        thread.ids = thread.ids + self._new(max(answer + 1, new))
        idle = self._lognormal(*IDLE_S)
        self._time += max(idle, IDLE_GAP_S) if "idle gap" in kinds else idle

    def _agents(self, main: _Thread, groups: int, *, waited_for: bool) -> None:
        """Sub-agents side by side; the session goes on when all have ended, or at once."""
        start = self._time
        ends = []
        for _ in range(groups):
            self._time = start + SPAWN_S
            head = main.ids[: min(AGENT_HEAD, main.head)]
            requests = self._agent_turns(head)
            ends.append(requests[-1].end)
            self._entries.append(
                Subagent(
                    t=round(start + SPAWN_S, 3),
                    agent_id=f"agent-{self._fresh}",
                    subagent_type="explore",
                    duration_ms=round(1000 * (ends[-1] - start - SPAWN_S)),
                    status="completed",
                    models=[MODEL],
                    tool_tokens=BLOCK * len(head),
                    requests=list(requests),
                )
            )
        self._time = max(ends) + SPAWN_S if waited_for else start

    def _flat_agent(self, main: _Thread) -> None:
        """An agent whose requests stand among the session's own, beside which it ran."""
        start = self._time
        self._time += SPAWN_S
        self._entries += self._agent_turns(main.ids[: main.head])
        self._time = start

    def _agent_turns(self, head: list[int]) -> list[Turn]:
        """The requests of an agent whose prompts begin with these blocks."""
        thread = self._thread(head, AGENT_PROMPT)
        turns = [self._turn(thread)]
        for _ in range(self._draw.randint(0, round(2 * AGENT_TURNS * self._median_turns))):
            self._go_on(thread)
            turns.append(self._turn(thread))
        return turns

    def _lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(self._draw.gauss(0.0, sigma))

    def _new(self, count: int) -> list[int]:
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))


def _blocks(tokens: float) -> int:
    return max(1, round(tokens / BLOCK))
