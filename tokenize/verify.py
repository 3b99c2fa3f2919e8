"""Encodes a share of the prompts again with `tokenizers`, behind everybody's back, and compares.

Promises to cost a request nothing but a look at a queue: the queue is bounded and a full one skips the check; the
thread has the lowest priority. At a difference the backend is given up, and the smallest piece of text that shows it
is looked for and logged: its length and place, the text itself only where prompts may be logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, Frame, HfBackend, Ids

log = logging.getLogger(__name__)

# Prompts that wait for their check: their texts are held in memory, and a check takes up to a second.
MAX_WAITING: Final = 16
# Encodings spent on finding the smallest piece that differs.
MAX_TRIES: Final = 400
LOWEST_PRIORITY: Final = 19


class Sample(NamedTuple):
    """A prompt as it was encoded; `frame` is what stands around its ids, if anything."""

    backend: Backend
    text: str
    ids: Ids
    frame: Frame | None


@dataclass(slots=True)
class Checks:
    """What verification did so far."""

    done: int = 0
    skipped: int = 0  # the queue was full
    mismatches: int = 0
    switches: int = 0


class Verifier:
    """One thread that checks samples. It ends with `close`, or with the process."""

    def __init__(
        self,
        reference: HfBackend,
        added: AddedTokens,
        distrust: Callable[[Backend], None],
        rate: float,
        *,
        log_prompts: bool,
    ) -> None:
        """`distrust` is told of a wrong backend, in the verifier's thread."""
        self.checks: Final = Checks()
        self._reference = reference
        self._added = added
        self._distrust = distrust
        self._rate = rate
        self._log_prompts = log_prompts
        self._distrusted: Backend | None = None
        self._random = random.Random()  # noqa: S311 - a sample, not a secret
        self._queue: queue.Queue[Sample | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def offer(self, backend: Backend, text: str, ids: Ids, frame: Frame | None) -> None:
        """Maybe check this later. Never waits; called from any thread."""
        if backend is self._reference or self._random.random() >= self._rate:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(Sample(backend, text, ids, frame))
        except queue.Full:
            self.checks.skipped += 1

    def wait(self) -> None:
        """Until all that was offered is checked."""
        self._queue.join()

    def close(self) -> None:
        """Check nothing more; the thread ends after the sample it is at."""
        self._rate = 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
                self._queue.task_done()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while (sample := self._queue.get()) is not None:
            try:
                self._check(sample)
            except Exception:  # the thread's border: one bad sample must not end all checks
                log.exception("a prompt of %d characters could not be checked", len(sample.text))
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _check(self, sample: Sample) -> None:
        expected = self._reference.encode(sample.text)
        if sample.frame is not None:
            expected = sample.frame.around(expected)
        self.checks.done += 1
        if np.array_equal(expected, sample.ids):
            return
        self.checks.mismatches += 1
        if self._distrusted is not sample.backend:
            self._distrusted = sample.backend
            self._distrust(sample.backend)
            self.checks.switches += 1
            self._report(sample, expected)

    def _report(self, sample: Sample, expected: Ids) -> None:
        at = first_difference(sample.ids, expected)
        log.error(
            "tokenizer backend %s gave other ids than tokenizer.encode for a prompt of %d characters, first at id %d; "
            "hf encodes from now on", sample.backend.name, len(sample.text), at,
        )  # fmt: skip
        piece = self._smallest(sample.backend, sample.text)
        if piece is None:
            log.error("no part of that prompt shows the difference by itself")
            return
        shown = repr(piece) if self._log_prompts else "not shown without --log-prompts"
        log.error("the smallest part found that differs has %d characters: %s", len(piece), shown)

    def _smallest(self, backend: Backend, text: str) -> str | None:
        """Shrink the text from both ends, by less and less, for as long as it still shows the difference."""
        tries = iter(range(MAX_TRIES))

        def differs(piece: str) -> bool:
            return not np.array_equal(backend.encode(piece), self._reference.encode(piece))

        found = next((piece for piece in self._pieces(text) if differs(piece)), None)
        if found is None:
            if not differs(text):
                return None
            found = text
        step = len(found) // 2
        while step and next(tries, None) is not None:
            shorter = next((piece for piece in (found[step:], found[:-step]) if differs(piece)), None)
            if shorter is None:
                step //= 2
            else:
                found = shorter
                step = min(step, len(found) // 2)
        return found

    def _pieces(self, text: str) -> list[str]:
        """The text between added tokens."""
        borders = [0, *(place for match in self._added.split(text) for place in (match.start, match.end)), len(text)]
        return [text[low:high] for low, high in pairwise(borders) if low < high]


def first_difference(ids: Ids, expected: Ids) -> int:
    """The place of the first id that differs, or at which one of the two ends."""
    shared = min(len(ids), len(expected))
    different = np.flatnonzero(ids[:shared] != expected[:shared])
    return int(different[0]) if len(different) else shared
