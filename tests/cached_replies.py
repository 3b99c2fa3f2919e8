"""Requests over HTTP as the tests of the prefix cache need them: prompts that share pages, what each of them reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np

from hicache.keys import PAGE_TOKENS
from tests.http_calls import TEXT, post
from tests.serving import RunningServer

# Greedy and of a fixed length, so that an answer depends on its prompt's pages alone.
FIXED: Final = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
ASCII: Final = 128  # ids below are characters of the byte tokenizer


@dataclass(frozen=True)
class Reply:
    """One answer and what its prompt reused."""

    text: str
    cached: int
    device: int
    host: int
    why: str


def prompt(pages: float, seed: int = 0) -> list[int]:
    """So many pages of a prompt; a longer one of the same seed begins with a shorter one."""
    drawn = np.random.default_rng(seed).integers(0, ASCII, 64 * PAGE_TOKENS)
    return drawn[: int(pages * PAGE_TOKENS)].tolist()  # type: ignore[no-any-return]


async def ask(client: aiohttp.ClientSession, ids: list[int], **fields: Any) -> Reply:
    """Ask for a completion, then how it came about."""
    async with client.post(TEXT, json={"prompt": ids, **FIXED, **fields}) as answer:
        document = await answer.json()
        assert answer.status == 200, document
        request_id = answer.headers["X-Request-ID"]
    (told,) = (await explained(client, request_id))["prompts"]
    usage = document["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (usage["prompt_tokens"], cached) == (len(ids), told["cached_tokens"])
    text = document["choices"][0]["text"]
    return Reply(text, cached, told["cached_device"], told["cached_host"], told["why_not_more"])


async def explained(client: aiohttp.ClientSession, request_id: str) -> dict[str, Any]:
    """What the server says of a request."""
    async with client.get(f"/deepinfer/requests/{request_id}") as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
        return found


async def ask_both(client: aiohttp.ClientSession, ids: list[int], **fields: Any) -> Reply:
    """With the cache, and without: the answers must be the same. Returns the former."""
    reply = await ask(client, ids, **fields)
    bypassed = await ask(client, ids, prefix_cache=False, **fields)
    assert (bypassed.cached, bypassed.why) in ((0, "bypassed"), (0, "disabled"), (0, "off"))
    assert reply.text == bypassed.text
    return reply


async def reset(client: aiohttp.ClientSession) -> dict[str, Any]:
    """Drop all that is cached."""
    return await post(client, "/deepinfer/cache/reset")


def cache_metric(server: RunningServer, name: str, **labels: str) -> float:
    """A sample of the cache."""
    return server.metric(name, "deepinfer_hicache", **labels)
