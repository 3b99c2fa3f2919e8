"""The server's end of `queue_engine`: submits requests, and moves each step to the event loop by a thread.

One `asyncio.Queue` per request, found by a running number. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.baselines.queue_engine import Command, Item, serve
from ipc.messages import Cancel, Launch, Sampling, Submit

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

# Loading the fake takes well under a second; a minute without a sign is a failure.
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0

Tokens = asyncio.Queue[tuple[int, int]]  # token, finish


class QueueEngine:
    """A running engine process. `open` and `close` of requests are called on the event loop only."""

    def __init__(self, told: Launch) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands: Queue[Command] = context.Queue()
        self._steps: Queue[list[Item]] = context.Queue()
        self._process = context.Process(target=serve, args=(told, self._commands, self._steps), daemon=True)
        self._streams: dict[int, Tokens] = {}
        self._next = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process, wait until it is ready, then deliver to `loop`. Raises queue.Empty after a minute."""
        self._process.start()
        self._steps.get(timeout=START_TIMEOUT_S)
        threading.Thread(target=self._dispatch, args=(loop,), daemon=True).start()

    def stop(self) -> None:
        """End the process."""
        self._commands.put(None)
        self._process.join(STOP_TIMEOUT_S)
        self._process.kill()

    def submit(
        self, ids: Sequence[int], max_tokens: int, temperature: float, seed: int, *, ignore_eos: bool
    ) -> tuple[int, Tokens]:
        """Start a request; its number and its tokens. `forget` it when done."""
        number = self._next
        self._next += 1
        tokens: Tokens = asyncio.Queue()
        self._streams[number] = tokens
        prompt = np.array(ids, "<i4").tobytes()
        sampling = Sampling(seed, temperature)
        self._commands.put(Submit(number, 0, str(number), prompt, max_tokens, sampling, ignore_eos=ignore_eos))
        return number, tokens

    def forget(self, number: int, *, ended: bool) -> None:
        """Deliver nothing more to this request, and stop it if it has not ended."""
        del self._streams[number]
        if not ended:
            self._commands.put(Cancel(number, 0))

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: one wake-up of the loop per step, not per token."""
        while True:
            step = self._steps.get()
            try:
                loop.call_soon_threadsafe(self._deliver, step)
            except RuntimeError:  # the loop is closed: the server has ended
                return

    def _deliver(self, step: list[Item]) -> None:
        for number, token, finish in step:
            tokens = self._streams.get(number)
            if tokens is not None:
                tokens.put_nowait((token, finish))
