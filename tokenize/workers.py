"""Threads that encode: a bounded number, which the end of the process does not wait for.

Like `concurrent.futures.ThreadPoolExecutor` but for three things: its threads are daemons, since native code cannot be
told to stop; what runs when it is closed fails at once, so nobody waits for it; and threads that idle can be borrowed.
Knows nothing about texts.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, TypeVar

from server.tokenizer.errors import EncoderClosedError

T = TypeVar("T")


class Workers:
    """At most `size` threads, started as they are needed. Thread-safe."""

    def __init__(self, size: int, name: str, first: Callable[[], object] = lambda: None) -> None:
        """`first` is what each thread does when it starts."""
        self.size: Final = size
        self._name: Final = name
        self._first: Final = first
        self._changed: Final = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._waiting: deque[_Task] = deque()
        self._running: set[_Task] = set()
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when a thread is free. Raises EncoderClosedError, and so does the future when closed meanwhile."""
        task = _Task(work)
        with self._changed:
            if self._closed:
                raise EncoderClosedError
            self._put(task)
        return task.future

    def lend(self, work: Callable[[], None], at_most: int) -> list[Future[None]]:
        """Do this in so many of the threads that have nothing to do now; in none where all are busy."""
        with self._changed:
            idle = 0 if self._closed else self.size - len(self._running) - len(self._waiting)
            tasks = [_Task(work) for _ in range(min(idle, at_most))]
            for task in tasks:
                self._put(task)
        return [task.future for task in tasks]

    def start(self) -> None:
        """Start all threads now."""
        with self._changed:
            while len(self._threads) < self.size and not self._closed:
                self._add()

    def close(self) -> None:
        """Fail all that waits or runs; threads end after what they are at."""
        with self._changed:
            self._closed = True
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify_all()
        for task in left:
            task.fail(EncoderClosedError())

    def _put(self, task: _Task) -> None:
        self._waiting.append(task)
        self._changed.notify()
        if len(self._threads) < min(self.size, len(self._running) + len(self._waiting)):
            self._add()

    def _add(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        self._first()
        while (task := self._next()) is not None:
            task.run()
            with self._changed:
                self._running.discard(task)
            del task  # or an idle thread would hold a text and its ids

    def _next(self) -> _Task | None:
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                task = self._waiting.popleft()
                # Under the lock: `close` must not meet a task that is neither waiting nor running.
                if task.future.set_running_or_notify_cancel():
                    self._running.add(task)
                    return task
                del task


class _Task:
    """Work and the future of what comes of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Final[Future[Any]] = Future()
        self._work = work

    def run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread's border: whoever waits is told
            self.fail(error)
        else:
            with contextlib.suppress(InvalidStateError):  # closed meanwhile
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # it has ended, or was given up
            self.future.set_exception(error)
