"""Answers one request from its generations, streamed or whole; the form (chat, text) decides the bytes.

Whatever happens, every generation is left through its `with` block: nothing stays held for a client that went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from aiohttp import web

from server.errors import ApiError
from server.generate import Generation, Piece
from server.sse import DONE, EventStream


class Usage(NamedTuple):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(Protocol):
    """How an endpoint writes its answer."""

    def opening(self, index: int) -> bytes:
        """Events before a choice's first piece."""
        ...

    def events(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """Events of a batch of pieces."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event that carries the usage, after all choices."""
        ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON document of an answer that is not streamed."""
        ...


async def answer(
    request: web.Request, generations: Sequence[Generation], form: Form, *, stream: bool, include_usage: bool
) -> web.StreamResponse:
    """Run the generations to their end. Raises ApiError while nothing has been sent; later it is an event."""
    if not stream:
        with _held(generations):
            return await _whole(generations, form)
    events = EventStream(request)
    try:
        with _held(generations):
            await _pump_all(events, generations, form)
            ending = form.usage_event(_usage(generations)) if include_usage else b""
            await events.write(ending + DONE)
    except ApiError as error:
        if not events.opened:
            raise
        await events.fail(error)
    return events.response


def _held(generations: Sequence[Generation]) -> ExitStack:
    with ExitStack() as stack:
        for generation in generations:
            stack.enter_context(generation)
        return stack.pop_all()


async def _whole(generations: Sequence[Generation], form: Form) -> web.Response:
    # One after the other: they run side by side in the engine, and each queue is bounded by its own max_tokens.
    choices = [[piece async for batch in generation.batches() for piece in batch] for generation in generations]
    return web.Response(body=form.whole(choices, _usage(generations)), content_type="application/json")


async def _pump_all(events: EventStream, generations: Sequence[Generation], form: Form) -> None:
    if len(generations) == 1:
        await _pump(events, 0, generations[0], form)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for index, generation in enumerate(generations):
                group.create_task(_pump(events, index, generation, form))
    except* (ApiError, ConnectionError) as errors:
        raise errors.exceptions[0] from None


async def _pump(events: EventStream, index: int, generation: Generation, form: Form) -> None:
    opening = form.opening(index)
    async for pieces in generation.batches():
        await events.write(opening + form.events(index, pieces))
        opening = b""


def _usage(generations: Sequence[Generation]) -> Usage:
    accounts = [generation.account for generation in generations]
    return Usage(
        sum(account.prompt_tokens for account in accounts),
        sum(account.completion_tokens for account in accounts),
        0,
    )
