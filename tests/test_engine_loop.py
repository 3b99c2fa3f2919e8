"""A rank's loop over a real link: its engine's end runs in a thread, the server's end is the test."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.fake import FakeEngine, FakePace
from engine.loop import COMMANDS_PER_PASS, RankLoop
from engine.protocol import StepOutput
from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink, ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import (
    Cancel,
    Event,
    Finish,
    Launch,
    LinkFds,
    RequestError,
    Sampling,
    Shutdown,
    Stats,
    Submit,
)
from tests.byte_tokenizer import write_model
from tests.serving import DEADLINE_S, eventually

SHAPE = LinkShape(submit_bytes=1 << 20, event_bytes=1 << 16, token_records=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loop") / "bytes")


def engine_of(model: Path, pace: FakePace | None = None) -> FakeEngine:
    return FakeEngine(Launch(0, 1, "fake", str(model), LinkFds(0, 0, 0), 0, max_num_seqs=4), pace or FakePace())


def request(slot: int = 0, *, ids: tuple[int, ...] = (1, 2, 3), max_tokens: int = 20, generation: int = 1) -> Submit:
    raw = np.array(ids, "<i4").tobytes()
    return Submit(slot, generation, f"r{slot}", raw, max_tokens, Sampling(seed=1), ignore_eos=True)


class LoopUnderTest:
    """A running loop, the server's end of its link, and all that came over it so far."""

    def __init__(self, engine: FakeEngine) -> None:
        self.server = ServerLink.create(SHAPE)
        self._engine_end = EngineLink.attach(self.server.fds, SHAPE)
        self.loop = RankLoop(engine, self._engine_end, log_interval_steps=1)
        self.thread = threading.Thread(target=self.loop.run)
        self.events: list[Event] = []
        self.records: npt.NDArray[np.void] = np.empty(0, TOKEN_DTYPE)

    def send(self, *commands: Submit | Cancel | Shutdown) -> None:
        for command in commands:
            assert self.server.send(command)

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Drain as the server does until the condition holds."""
        bell = select.poll()
        bell.register(self.server.fileno(), select.POLLIN)
        while True:
            drained = self.server.drain(16)
            self.events += drained.events
            self.records = np.concatenate([self.records, drained.records])
            if condition():
                return
            if not drained and self.server.arm():
                assert bell.poll(DEADLINE_S * 1000), "the loop went silent"
                self.server.acknowledge()

    def ends(self) -> dict[int, Finish]:
        """Slot -> how it ended."""
        ended = self.records[self.records["finish"] != Finish.NONE]
        return {int(record["slot"]): Finish(int(record["finish"])) for record in ended}

    def tokens(self, slot: int) -> list[int]:
        mine = self.records[(self.records["slot"] == slot) & (self.records["flags"] & 1 == 1)]
        return [int(token) for token in mine["token"]]

    def last_stats(self) -> Stats | None:
        return next((event for event in reversed(self.events) if isinstance(event, Stats)), None)

    def idle_with_nothing_held(self) -> bool:
        stats = self.last_stats()
        return stats is not None and (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def close(self) -> None:
        self.server.send(Shutdown())
        while self.thread.is_alive():
            self.server.drain(1000)  # a stalled loop goes on only once it is read
            self.thread.join(0.01)
        self._engine_end.close()
        self.server.close()


@contextmanager
def running_loop(engine: FakeEngine) -> Iterator[LoopUnderTest]:
    under_test = LoopUnderTest(engine)
    under_test.thread.start()
    try:
        yield under_test
    finally:
        under_test.close()


def expected(model: Path, submit: Submit) -> list[int]:
    """What the engine answers without a loop."""
    engine = engine_of(model)
    engine.add(submit)
    found = []
    while engine.has_work():
        found += [int(record["token"]) for record in engine.step().records]
    return found


def test_a_request_is_answered_and_the_idle_rank_says_so(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.send(request())
        under_test.read_until(lambda: under_test.ends() == {0: Finish.LENGTH})
        assert under_test.tokens(0) == expected(model, request())
        stats = under_test.last_stats
        under_test.read_until(lambda: (found := stats()) is not None and found.steps == 20)
        assert under_test.idle_with_nothing_held()
        eventually(lambda: under_test.server.beat().state is EngineState.IDLE, "the heartbeat says idle")
        assert under_test.server.beat().step == 20


def test_a_refused_request_costs_no_other_anything(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.send(request(0), request(1, ids=(999,)), request(2))
        under_test.read_until(lambda: len(under_test.ends()) == 3)
        assert under_test.ends() == {0: Finish.LENGTH, 1: Finish.ERROR, 2: Finish.LENGTH}
        (error,) = (event for event in under_test.events if isinstance(event, RequestError))
        assert (error.slot, error.generation, error.client_fault) == (1, 1, True)
        assert "token id 999" in error.message
        assert under_test.tokens(0) == under_test.tokens(2) == expected(model, request())


class _BrittleEngine(FakeEngine):
    """Fails on prompts that start with 7, in `add`; on those that start with 8, in the step."""

    def add(self, request: Submit) -> None:
        first = np.frombuffer(request.ids, "<i4")[0]
        if first == 7:
            raise MemoryError("no room for sevens")
        self.broken = first == 8
        super().add(request)

    def step(self) -> StepOutput:
        if self.broken:
            raise RuntimeError("eights cannot be stepped")
        return super().step()


def brittle(model: Path) -> _BrittleEngine:
    return _BrittleEngine(Launch(0, 1, "fake", str(model), LinkFds(0, 0, 0), 0, max_num_seqs=4), FakePace())


def test_a_request_that_breaks_the_engine_s_add_fails_alone(model: Path) -> None:
    with running_loop(brittle(model)) as under_test:
        under_test.send(request(1, ids=(7,)), request(0))
        under_test.read_until(lambda: len(under_test.ends()) == 2)
        assert under_test.ends() == {0: Finish.LENGTH, 1: Finish.ERROR}
        (error,) = (event for event in under_test.events if isinstance(event, RequestError))
        assert not error.client_fault
        assert "sevens" not in error.message


def test_a_step_that_fails_leaves_the_loop(model: Path) -> None:
    server = ServerLink.create(SHAPE)
    link = EngineLink.attach(server.fds, SHAPE)
    server.send(request(ids=(8,)))
    with pytest.raises(RuntimeError, match="eights"):
        RankLoop(brittle(model), link, 0).run()
    link.close()
    server.close()


def test_cancels_are_answered_once_and_only_where_something_ran(model: Path) -> None:
    with running_loop(engine_of(model, FakePace(step_s=0.001))) as under_test:
        long = [request(slot, max_tokens=8000) for slot in range(6)]  # four run, two wait
        under_test.send(*long)
        under_test.read_until(lambda: len(under_test.tokens(0)) > 2)
        under_test.send(*(Cancel(slot, 1) for slot in range(6)), Cancel(0, 1), Cancel(3, 2), Cancel(60, 1))
        under_test.send(request(9))
        under_test.read_until(lambda: 9 in under_test.ends())
        ends = under_test.records[under_test.records["finish"] == Finish.CANCELLED]
        assert sorted(int(record["slot"]) for record in ends) == list(range(6))
        assert not (ends["flags"] & 1).any()
        under_test.read_until(under_test.idle_with_nothing_held)


def test_a_command_that_cannot_be_read_is_skipped(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.send(request(0))
        assert under_test.server._submit.push(b"\xc1 no command")
        under_test.send(request(1))
        under_test.read_until(lambda: len(under_test.ends()) == 2)
    assert "a command could not be read" in caplog.text


def test_a_rank_that_is_not_read_stops_stepping_and_loses_nothing(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        many = [request(slot, max_tokens=500) for slot in range(4)]
        under_test.send(*many)
        eventually(lambda: under_test.loop.stats().stalls > 3, "the loop counts passes that it skipped")
        before = under_test.loop.stats()
        eventually(lambda: under_test.loop.stats().stalls > before.stalls + 3, "it goes on waiting")
        assert under_test.loop.stats().steps == before.steps
        assert before.steps < 500
        under_test.read_until(lambda: len(under_test.ends()) == 4)
        for submit in many:
            assert under_test.tokens(submit.slot) == expected(model, submit)


def test_shutdown_leaves_the_loop_with_requests_running(model: Path) -> None:
    with running_loop(engine_of(model, FakePace(step_s=0.001))) as under_test:
        under_test.send(request(max_tokens=8000))
        under_test.read_until(lambda: len(under_test.tokens(0)) > 0)
        under_test.send(Shutdown())
        eventually(lambda: not under_test.thread.is_alive(), "the loop ended")
        assert under_test.server.beat().state is EngineState.STOPPING


def test_stop_wakes_no_later_than_the_next_beat_of_an_idle_rank(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.read_until(under_test.idle_with_nothing_held)
        under_test.loop.stop()
        eventually(lambda: not under_test.thread.is_alive(), "the loop ended")


def test_an_idle_rank_keeps_beating(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.read_until(under_test.idle_with_nothing_held)
        first = under_test.server.beat().time_ns
        eventually(lambda: under_test.server.beat().time_ns > first, "a later beat")
        assert under_test.server.beat().step == 0


def test_a_flood_of_submissions_does_not_hold_up_the_first(model: Path) -> None:
    """Commands are taken in bounded passes with a step between: the first request ends before all were taken."""
    server = ServerLink.create(SHAPE)
    link = EngineLink.attach(server.fds, SHAPE)
    engine = engine_of(model)
    for slot in range(2 * COMMANDS_PER_PASS):
        assert server.send(request(slot, max_tokens=1))
    loop = RankLoop(engine, link, 0)
    loop._pass()
    assert server.drain(10).records["slot"].tolist() == [0, 1, 2, 3]
    assert engine.stats().waiting == COMMANDS_PER_PASS - 4
    link.close()
    server.close()


def test_progress_is_logged_at_the_interval(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with running_loop(engine_of(model)) as under_test:
        under_test.send(request(max_tokens=2))
        under_test.read_until(under_test.idle_with_nothing_held)
        under_test.read_until(lambda: under_test.ends() != {})
    assert "step 1: running 1, waiting 0, blocks 1/8192, preemptions 0, stalls 0" in caplog.text
