"""Calls over HTTP that check what every answer must have: a good document, a whole stream, an error in our shape."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from tests.byte_tokenizer import IM_END, IM_START

HELLO = [{"role": "user", "content": "hello"}]
HELLO_IDS = [IM_START, *b"user\nhello", IM_END, *b"\n", IM_START, *b"assistant\n"]
FIXED = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    """The document of an answer that must be a good one."""
    async with client.post(path, json=body) as answer:
        document: dict[str, Any] = await answer.json()
        assert answer.status == 200, document
        return document


async def stream(client: aiohttp.ClientSession, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, which must end with [DONE]."""
    async with client.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        *events, done, nothing = (await answer.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


async def refusal(
    client: aiohttp.ClientSession, path: str, status: int, method: str = "POST", **request: Any
) -> dict[str, Any]:
    """The error of a request that must be refused in OpenAI's shape."""
    async with client.request(method, path, **request) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        assert answer.headers["X-Request-ID"]
        error = (await answer.json())["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error
