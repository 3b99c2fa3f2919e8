"""The threads that encode: bounded, lent only while idle, and nothing waits for one once they are closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait

import pytest

from server.tokenizer.errors import EncoderClosedError
from server.tokenizer.workers import Workers

DEADLINE_S = 60


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens at the end of a test at the latest, so that no thread is left."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, "test")
    yield made
    made.close()


def test_what_is_done_and_what_fails_is_told(workers: Workers) -> None:
    assert [workers.submit(lambda number=number: 2 * number).result(DEADLINE_S) for number in range(9)] == [  # type: ignore[misc]
        2 * number for number in range(9)
    ]
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0).result(DEADLINE_S)


def test_no_more_threads_than_said_and_no_more_than_needed(workers: Workers, gate: threading.Event) -> None:
    named = {workers.submit(threading.current_thread).result(DEADLINE_S).name for _ in range(9)}
    blocked = [workers.submit(gate.wait) for _ in range(9)]
    assert [thread.name for thread in workers._threads] == ["test_0", "test_1"]
    assert named <= {"test_0", "test_1"}
    gate.set()
    assert len(wait(blocked, DEADLINE_S).done) == 9


def test_only_idle_threads_are_lent(workers: Workers, gate: threading.Event) -> None:
    started = threading.Barrier(2, timeout=DEADLINE_S)

    def block() -> None:
        started.wait()
        gate.wait()

    workers.submit(block)
    started.wait()
    (helper,) = workers.lend(lambda: None, at_most=5)
    helper.result(DEADLINE_S)
    workers.submit(block)
    started.wait()
    assert workers.lend(lambda: None, at_most=5) == []
    assert workers.lend(lambda: None, at_most=0) == []


def test_what_was_given_up_before_it_began_is_not_done(workers: Workers, gate: threading.Event) -> None:
    done: list[str] = []
    for _ in range(2):
        workers.submit(gate.wait)
    waiting = workers.submit(lambda: done.append("never"))
    assert waiting.cancel()
    last = workers.submit(lambda: done.append("last"))
    gate.set()
    last.result(DEADLINE_S)
    assert done == ["last"]
    with pytest.raises(CancelledError):
        waiting.result(0)


def test_closing_fails_what_runs_and_what_waits_at_once(gate: threading.Event) -> None:
    workers = Workers(1, "closing")
    started = threading.Event()

    def block() -> None:
        started.set()
        gate.wait()

    running, waiting = workers.submit(block), workers.submit(block)
    started.wait(DEADLINE_S)
    workers.close()
    for future in (running, waiting):
        with pytest.raises(EncoderClosedError):
            future.result(DEADLINE_S)
    with pytest.raises(EncoderClosedError):
        workers.submit(block)
    assert workers.lend(block, at_most=1) == []
    workers.close()


def test_threads_end_when_closed_and_nothing_waits_for_them(gate: threading.Event) -> None:
    workers = Workers(2, "ending")
    idle, busy = workers.submit(threading.current_thread).result(DEADLINE_S), workers.submit(gate.wait)
    assert idle.daemon
    workers.close()
    gate.set()
    for thread in workers._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert busy.done()


def test_an_idle_thread_holds_nothing_of_what_it_did(workers: Workers) -> None:
    class Text:
        """Something to be collected."""

    collected = threading.Event()
    text = Text()
    weakref.finalize(text, collected.set)
    workers.submit(lambda text=text: None).result(DEADLINE_S)  # type: ignore[misc]
    del text
    assert collected.wait(DEADLINE_S)
