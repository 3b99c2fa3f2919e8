"""A rank's loop over a real link: its engine's end runs in a thread, the server's end is the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.fake import FakeEngine
from engine.fake_settings import FakePace
from engine.loop import COMMANDS_PER_PASS, RankLoop
from engine.protocol import StepOutput
from hicache.keys import extend
from hicache.pool import PoolFiles
from hicache.shape import PoolShape
from ipc.heartbeat import EngineState
from ipc.link import EngineLink, ServerLink
from ipc.messages import (
    CacheForget,
    CacheLoaded,
    CacheOffer,
    CachePlan,
    CacheStore,
    CacheStored,
    Cancel,
    Finish,
    Launch,
    LinkFds,
    RequestError,
    Shutdown,
    Submit,
)
from tests.byte_tokenizer import MAX_MODEL_LEN, write_model
from tests.fake_engine import engine_of, request
from tests.loop_thread import SHAPE, LoopUnderTest, running_loop
from tests.serving import eventually


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loop") / "bytes")


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
    with running_loop(engine_of(model, FakePace(step_s=0.001), num_kv_blocks=512)) as under_test:
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


@contextmanager
def loop_with_pool(model: Path) -> Iterator[LoopUnderTest]:
    engine, files = engine_of(model), PoolFiles.create()
    pool = files.size(PoolShape(8, engine.facts.page_bytes, 0, 0))
    engine.attach(pool)
    with running_loop(engine) as under_test:
        yield under_test
    engine.close()
    pool.close()
    files.close()


def answers_of(under_test: LoopUnderTest) -> list[CacheLoaded | CacheStored | CacheOffer]:
    return [event for event in under_test.events if isinstance(event, CacheLoaded | CacheStored | CacheOffer)]


def planned(submit: Submit, number: int) -> Submit:
    """With a plan that loads nothing and stores its first page."""
    ids = np.frombuffer(submit.ids, "<i4")
    plan = CachePlan(number, b"r" * 16, extend(b"r" * 16, ids), store=number.to_bytes(4, "little"))
    return msgspec.structs.replace(submit, cache=plan)


def test_offered_pages_are_stored_and_forgotten_ones_are_not_found(model: Path) -> None:
    with loop_with_pool(model) as under_test:
        under_test.send(planned(request(0, max_tokens=100), 1))
        under_test.read_until(lambda: len(answers_of(under_test)) == 3)
        loaded, stored, offer = sorted(answers_of(under_test), key=lambda event: isinstance(event, CacheOffer))
        assert loaded == CacheLoaded(1)
        assert isinstance(stored, CacheStored)
        assert isinstance(offer, CacheOffer)
        assert len(offer.keys) == 16
        command = CacheStore(2, offer.keys, (5).to_bytes(4, "little"))
        under_test.send(command, CacheForget(), msgspec.structs.replace(command, plan=3))
        under_test.read_until(lambda: len(answers_of(under_test)) == 5)
        found = {event.plan: event.pages for event in answers_of(under_test) if isinstance(event, CacheStored)}
        assert found == {1: 1, 2: 1, 3: 0}
        under_test.send(planned(request(1), 4))
        under_test.read_until(lambda: CacheLoaded(4) in answers_of(under_test))
        under_test.read_until(under_test.idle_with_nothing_held)


@pytest.mark.parametrize("refused", [{"ids": [999] * 130}, {"ids": [1] * MAX_MODEL_LEN}])
def test_the_plan_of_a_refused_request_is_answered(model: Path, refused: dict[str, Any]) -> None:
    with loop_with_pool(model) as under_test:
        under_test.send(planned(request(0, **refused), 1), planned(request(1), 2))
        under_test.read_until(lambda: len(under_test.ends()) == 2)
        assert under_test.ends() == {0: Finish.ERROR, 1: Finish.LENGTH}
        assert answers_of(under_test)[:2] == [CacheLoaded(1), CacheStored(1)]


def test_a_plan_for_a_rank_without_a_pool_is_refused_and_answered(model: Path) -> None:
    with running_loop(engine_of(model)) as under_test:
        under_test.send(planned(request(), 1))
        under_test.read_until(lambda: under_test.ends() == {0: Finish.ERROR})
        assert answers_of(under_test) == [CacheLoaded(1), CacheStored(1)]


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
    assert "step 1: running 1, waiting 0, blocks 2/64, preemptions 0, stalls 0" in caplog.text
