"""Conversations of several turns that go back and branch inside pages, asked with the prefix cache and without it.

Every turn is one prompt of ids: asked of a server with its cache, of the same server bypassed, and of a server that
has none. The greedy answers must be the same; where the model finds two candidates equally likely, sums in another
order may choose the other one, and such a tie is only listed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import numpy as np

from bench.check_prefix_cache import Token, same
from hicache.keys import PAGE_TOKENS
from tests.http_calls import TEXT, post

# What all conversations of a run begin with, one of them each, as with system prompts; in tokens.
SYSTEMS: Final = (0, PAGE_TOKENS, PAGE_TOKENS + 70)


@dataclass(frozen=True)
class Kind:
    """What the conversations with one model are like; lengths in tokens."""

    vocabulary: Sequence[int]  # prompts are drawn from these ids
    opening: tuple[int, int]
    added: tuple[int, int]  # by each further turn
    answer: int  # at most
    longest: int  # history that a turn goes on from
    tokenize: Callable[[str], Awaitable[list[int]]]  # an answer as the next prompt has it


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    tokens: list[Token]
    cached: int


@dataclass
class Comparison:
    """What came of all turns so far."""

    turns: int = 0
    offsets: set[int] = field(default_factory=set)  # in a page, where histories branched
    cached: int = 0  # tokens
    generated: int = 0  # turns that reused pages of the answer before
    ties: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


class Conversation:
    """A history that grows, or is cut and goes on with something else. The same number makes the same questions."""

    def __init__(self, kind: Kind, number: int) -> None:
        self.draw = random.Random(number)
        self._kind = kind
        system = number % len(SYSTEMS)
        common = random.Random(-1 - system).choices(kind.vocabulary, k=SYSTEMS[system])
        self.ids = common + self._new(kind.opening)

    def go_on(self, said: Sequence[int]) -> None:
        """The answer and a new question."""
        self.ids = [*self.ids, *said][: self._kind.longest] + self._new(self._kind.added)

    def branch(self, said: Sequence[int], offset: int) -> None:
        """The same, but from some page on, at this offset in it, all is different."""
        history = [*self.ids, *said]
        last = (min(len(history), self._kind.longest) - 1 - offset) // PAGE_TOKENS
        cut = self.draw.randint(0, last) * PAGE_TOKENS + offset
        new = self._new(self._kind.added)
        while new[0] == history[cut]:
            new[0] = self.draw.choice(self._kind.vocabulary)
        self.ids = history[:cut] + new

    def _new(self, length: tuple[int, int]) -> list[int]:
        return self.draw.choices(self._kind.vocabulary, k=self.draw.randint(*length))


async def ask(client: aiohttp.ClientSession, ids: Sequence[int], answer: int, *, prefix_cache: bool = True) -> Reply:
    """A greedy answer."""
    body = {"prompt": list(ids), "temperature": 0, "max_tokens": answer, "logprobs": 2, "prefix_cache": prefix_cache}
    document = await post(client, TEXT, **body)
    (choice,) = document["choices"]
    found = choice["logprobs"]
    tokens = [Token(text, likely) for text, likely in zip(found["tokens"], found["top_logprobs"], strict=True)]
    return Reply(choice["text"], tokens, document["usage"]["prompt_tokens_details"]["cached_tokens"])


class Uncached:
    """Answers of a server that has no cache; those in `known` were asked for before."""

    def __init__(self, client: aiohttp.ClientSession, known: dict[bytes, Reply]) -> None:
        self._client = client
        self._known = known

    async def ask(self, ids: Sequence[int], answer: int) -> Reply:
        """A greedy answer."""
        key = np.array([answer, *ids], np.int32).tobytes()
        if key not in self._known:
            self._known[key] = await ask(self._client, ids, answer)
            assert self._known[key].cached == 0
        return self._known[key]


class Comparer:
    """Holds conversations with one server and compares every answer."""

    def __init__(self, client: aiohttp.ClientSession, uncached: Uncached, kind: Kind) -> None:
        self.found = Comparison()
        self._client = client
        self._uncached = uncached
        self.kind = kind

    async def hold(self, numbers: Iterable[int], branches: int, clients: int) -> Comparison:
        """Conversations of these numbers, some at once. Number n branches at the n-th `branches` offsets of a page."""
        left = iter(numbers)

        async def work(left: Iterator[int]) -> None:
            for number in left:
                await self._converse(number, branches)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(work(left))
        return self.found

    async def _converse(self, number: int, branches: int) -> None:
        conversation = Conversation(self.kind, number)
        said = await self._turn(conversation, f"{number}: opening")
        asked = len(conversation.ids)
        conversation.go_on(said)
        said = await self._turn(conversation, f"{number}: second turn", asked)
        for branch in range(branches):
            offset = (number * branches + branch) % PAGE_TOKENS
            conversation.branch(said, offset)
            said = await self._turn(conversation, f"{number}: branch at {offset}")
            self.found.offsets.add(offset)

    async def _turn(self, conversation: Conversation, name: str, before: int | None = None) -> list[int]:
        """Ask and compare; `before` are the tokens of the prompt that this one goes on from."""
        ids, answer, found = conversation.ids, self.kind.answer, self.found
        replies = {}
        order = conversation.draw.sample((True, False), 2)
        for prefix_cache in order:
            replies[prefix_cache] = await ask(self._client, ids, answer, prefix_cache=prefix_cache)
        assert replies[False].cached == 0
        assert replies[True].cached < len(ids)
        self.judge(name, replies[True], replies[False])
        self.judge(name, replies[True], await self._uncached.ask(ids, answer))
        found.turns += 1
        found.cached += replies[True].cached
        if before is not None and order[0]:  # else the bypassed one has just stored all of it
            found.generated += replies[True].cached > before // PAGE_TOKENS * PAGE_TOKENS
        return await self.kind.tokenize(replies[True].text)

    def judge(self, name: str, one: Reply, other: Reply) -> None:
        """Note where two answers to the same prompt differ."""
        verdict = same(one.tokens, other.tokens)
        if verdict != "yes":
            where = self.found.ties if verdict == "tie" else self.found.different
            where.append(f"{name}, {one.cached} tokens cached: {one.text!r} and {other.text!r}")
