"""Answers one request from its generations, streamed or whole; the form (chat, text) decides the bytes.

Whatever happens, every generation is left through its `with` block: nothing stays held for a client that went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack

from aiohttp import web

from server.envelope import Usage
from server.errors import ApiError, RequestTimeoutError
from server.events import EventWriter
from server.form import Form
from server.generate import Generation, Piece
from server.services import Manner
from server.sse import DONE, EventStream


async def answer(
    request: web.Request, generations: Sequence[Generation], form: Form, manner: Manner
) -> web.StreamResponse:
    """Run the generations to their end. Raises ApiError while nothing has been sent; later it is an event."""
    if not manner.stream:
        # The deadline is inside: an answer that it ends is an error, not a client that left.
        with _held(generations):
            async with _Timed(manner.timeout_s):
                return await _whole(generations, form)
    with EventStream(request) as events:
        try:
            with _held(generations):
                async with _Timed(manner.timeout_s):
                    await _stream(events, generations, form, manner)
        except ApiError as error:
            if not events.opened:
                raise
            await events.fail(error)
    return events.response


class _Timed:
    """A deadline whose passing is an ApiError."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise RequestTimeoutError(f"the request took longer than {self._timeout_s:g} s") from None


def _held(generations: Sequence[Generation]) -> ExitStack:
    with ExitStack() as stack:
        for generation in generations:
            stack.enter_context(generation)
        return stack.pop_all()


async def _whole(generations: Sequence[Generation], form: Form) -> web.Response:
    # Side by side: one may wait for the pages of another, and must not hold up a third.
    await _together([generation.start() for generation in generations])
    # Read one after the other: they run side by side in the engine, and each queue is bounded by its max_tokens.
    choices = [[piece async for batch in generation.pieces() for piece in batch] for generation in generations]
    return web.Response(body=form.whole(choices, _usage(generations)), content_type="application/json")


async def _stream(events: EventStream, generations: Sequence[Generation], form: Form, manner: Manner) -> None:
    pumps = [_pump(events, index, generation, form, manner) for index, generation in enumerate(generations)]
    await _together(pumps)
    ending = form.usage_event(_usage(generations)) if manner.include_usage else b""
    await events.write(ending + DONE)


async def _together(pumps: Sequence[Coroutine[None, None, None]]) -> None:
    if len(pumps) == 1:
        await pumps[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for pump in pumps:
                group.create_task(pump)
    except* (ApiError, ConnectionError) as errors:
        raise errors.exceptions[0] from None


async def _pump(events: EventStream, index: int, generation: Generation, form: Form, manner: Manner) -> None:
    await generation.start()
    writer = form.writer(index) if generation.plain and not manner.continuous_usage else None
    if writer is not None:
        await _pump_ids(events, index, generation, form, writer)
        return
    opening = form.opening(index)
    async for pieces in generation.pieces():
        before = _usage_before(generation, pieces) if manner.continuous_usage else None
        await events.write(opening + form.events(index, pieces, before))
        opening = b""


async def _pump_ids(events: EventStream, index: int, generation: Generation, form: Form, writer: EventWriter) -> None:
    """The fast way: after the first batch, ids go from the collector to the socket without waking this task."""
    opening = form.opening(index)
    while True:
        ids, finish_reason = await generation.next_ids()
        if finish_reason is not None:
            # In the order of the ids: a character may begin in one and end in the next.
            before = opening + writer.push(ids[:-1])
            # A stop by the engine is its end-of-sequence id, which is no text.
            text = writer.text(int(ids[-1])) if finish_reason != "stop" else ""
            await events.write(before + form.last(index, text + writer.flush(), finish_reason))
            return
        if not len(ids):
            return
        await events.write(opening + writer.push(ids))
        opening = b""
        await generation.divert(lambda ids: events.send(writer.push(ids)))
        if not events.flowing:
            await events.drain()


def _usage_before(generation: Generation, pieces: Sequence[Piece]) -> Usage:
    account = generation.account
    return Usage(account.prompt_tokens, account.completion_tokens - len(pieces), account.cached_tokens)


def _usage(generations: Sequence[Generation]) -> Usage:
    # A prompt counts once, however many answers were drawn from it; it was cached as far as none had to compute it.
    prompts: dict[int, tuple[int, int]] = {}
    for generation in generations:
        account = generation.account
        _, cached = prompts.get(id(generation.prompt), (0, account.prompt_tokens))
        prompts[id(generation.prompt)] = account.prompt_tokens, min(cached, account.cached_tokens)
    completion_tokens = sum(generation.account.completion_tokens for generation in generations)
    return Usage(sum(one for one, _ in prompts.values()), completion_tokens, sum(one for _, one in prompts.values()))
