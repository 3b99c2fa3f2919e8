"""One replay: sessions in lanes, their requests sent and recorded, and what a cache could have served of them.

Promises a record for each request that was sent, also for those that failed or were cut off. Knows nothing about
figures or files.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.agentx.ceiling import BlockCeiling, PageCeiling
from bench.agentx.client import Answer, Client
from bench.agentx.lanes import Bounds, Lanes, Sending
from bench.agentx.pace import Pace
from bench.agentx.progress import Progress, State
from bench.agentx.prompts import Message, marker_of
from bench.agentx.record import CUT, Record
from bench.agentx.sent import Local
from bench.agentx.session import Session, Step
from bench.agentx.settings import Settings

# What servers say when a prompt is too long; the conversation cannot go on then.
TOO_LONG: Final = ("context length", "maximum context", "context_length_exceeded", "prompt is too long")
CONTEXT: Final = "context length"


class Replay:
    """Of `sessions` against the client's server."""

    def __init__(
        self, settings: Settings, sessions: Sequence[Session], local: Local, client: Client, model: str
    ) -> None:
        self._settings = settings
        self._sessions = {session.id: session for session in sessions}
        self._local = local
        self._client = client
        self._model = model
        self._started = 0.0
        self._records: list[Record] = []
        total = settings.max_requests or settings.passes * sum(session.size for session in sessions)
        self._state = State(total, settings.duration)

    async def run(self) -> list[Record]:
        """Send all that is to be sent; an interrupt from the keyboard ends it early, as a bound does."""
        settings = self._settings
        lanes = Lanes(
            list(self._sessions.values()), self._send, count=settings.lanes, warmup=settings.warmup,
            pace=Pace(settings.speedup, settings.idle_cap, settings.ignore_delays),
            bounds=Bounds(settings.passes, settings.duration, settings.max_requests),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lanes.stop)
        progress = asyncio.create_task(Progress(self._state).run())
        self._started = time.perf_counter()
        try:
            await lanes.run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        self._add_ceilings()
        return self._records

    async def _send(self, sending: Sending) -> bool:
        session, step = sending.session, sending.what
        marker = marker_of(self._settings.seed, session, sending.replay)
        body = self._body(step, self._local.prompts.messages(session, step, marker))
        record = Record(
            session=session.id, replay=sending.replay, lane=sending.lane, warmup=sending.warmup, step=sending.step,
            conversation=session.conversations[sending.conversation].name, number=sending.conversation,
            start=time.perf_counter() - self._started, trace_in=step.turn.tokens_in, trace_out=step.turn.tokens_out,
        )  # fmt: skip
        self._records.append(record)
        self._state.running += 1
        try:
            answer = await self._client.chat(body, {"X-Correlation-ID": f"agentx-{marker}"})
        except asyncio.CancelledError:
            record.error, record.end = CUT, time.perf_counter() - self._started - record.start
            raise
        finally:
            self._state.running -= 1
        _fill(record, answer, self._started)
        self._count(record)
        return record.error != CONTEXT

    def _body(self, step: Step, messages: list[Message]) -> dict[str, Any]:
        settings = self._settings
        optional = {"ignore_eos": True} if settings.ignore_eos else {}
        if settings.bypass_cache:
            optional["prefix_cache"] = False
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": max(1, step.turn.tokens_out),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **optional,
        }

    def _count(self, record: Record) -> None:
        state = self._state
        if record.error:
            state.failed += 1
        else:
            state.done += not record.warmup
            state.prompt_tokens += record.prompt_tokens
            state.cached_tokens += record.cached_tokens

    def _add_ceilings(self) -> None:
        """After the replay, as it takes time: rebuild the prompts in the order of their sending."""
        pages = PageCeiling()
        blocks: dict[tuple[str, int], BlockCeiling] = {}
        for record in sorted(self._records, key=lambda record: record.start):
            session = self._sessions[record.session]
            step = session.conversations[record.number].steps[record.step]
            marker = marker_of(self._settings.seed, session, record.replay)
            ids = self._local.ids(self._local.prompts.messages(session, step, marker))
            record.sent_tokens, record.shared_pages = len(ids), pages.shared(ids)
            ceiling = blocks.setdefault((session.id, record.replay), BlockCeiling(session.block_size))
            record.shared_blocks = ceiling.shared(step.turn.hash_ids, step.turn.tokens_in)


def _fill(record: Record, answer: Answer, started: float) -> None:
    record.start = answer.started - started
    record.ttft, record.last, record.end = (
        None if moment is None else moment - answer.started for moment in (answer.first, answer.last, answer.ended)
    )
    record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
    record.completion_tokens = answer.completion_tokens
    record.error, record.detail = answer.error, answer.detail
    if answer.error.startswith("http") and any(words in answer.detail.lower() for words in TOO_LONG):
        record.error = CONTEXT
