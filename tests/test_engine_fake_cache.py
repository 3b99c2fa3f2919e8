"""The fake engine with the host pool: its answers read every page and state, and are those of an engine without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake import FakeEngine
from hicache.faults import VARIABLE
from tests.byte_tokenizer import write_model
from tests.cache_server import CacheServer
from tests.conversations import Talk, answer_alone, run
from tests.fake_engine import engine_of, request

VOCABULARY = 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cache") / "bytes")


@pytest.fixture(params=[False, True], ids=["pages", "states"])
def stateful(request: pytest.FixtureRequest) -> bool:
    kind: bool = request.param
    return kind


@contextmanager
def served(
    model: Path, *, stateful: bool, engines: int = 2, pages: int = 256, verify_loads: bool = False, **fields: Any
) -> Iterator[CacheServer]:
    made = [engine_of(model, stateful=stateful, **fields) for _ in range(engines)]
    server = CacheServer(made, pages, verify_loads=verify_loads)
    yield server
    server.check_settled()
    server.close()


def talk_of(server: CacheServer, seed: int = 0, max_tokens: int = 12) -> Talk:
    return Talk(server, lambda slot, ids: request(slot, ids, max_tokens), VOCABULARY, seed)


def uncached(model: Path, stateful: bool) -> FakeEngine:
    return engine_of(model, stateful=stateful)


def converse(talk: Talk, alone: FakeEngine, turns: int, meddle: Callable[[], object] = lambda: None) -> None:
    """Turns that branch anywhere, some of them without the cache; every answer is the uncached one."""
    for _ in range(turns):
        prompt = talk.prompt(int(talk.random.integers(0, 1500)), int(talk.random.integers(1, 300)))
        asked, answer = talk.turn(prompt, reuse=bool(talk.random.integers(5)))
        assert answer == answer_alone(alone, asked)
        meddle()
        if len(talk.said) > 8:
            talk.said.pop(0)


def test_turns_that_branch_at_every_offset_of_a_page_answer_as_without(model: Path, stateful: bool) -> None:
    with served(model, stateful=stateful) as server:
        talk, alone = talk_of(server), uncached(model, stateful)
        talk.turn(talk.new_tokens(900))
        first = talk.said[0]
        for offset in range(128):
            if offset % 3 == 0:
                server.forget_devices()
            asked, answer = talk.turn(first[: 640 + offset] + talk.new_tokens(150))
            assert answer == answer_alone(alone, asked)
        assert talk.host_tokens > 128 * 128
        assert talk.device_tokens > 128 * 128


@pytest.mark.parametrize("pages", [256, 9], ids=["large pool", "pool smaller than a prompt"])
def test_generated_conversations_answer_as_without(model: Path, stateful: bool, pages: int) -> None:
    with served(model, stateful=stateful, pages=pages, num_kv_blocks=40) as server:
        talk = talk_of(server, seed=pages)
        converse(talk, uncached(model, stateful), 60)
        assert talk.device_tokens > 0
        assert talk.host_tokens > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_many_conversations_answer_as_without(model: Path, stateful: bool, seed: int) -> None:
    with served(
        model, stateful=stateful, pages=4 + seed, num_kv_blocks=40, max_num_batched_tokens=100 + seed
    ) as server:
        talk = talk_of(server, seed=seed)
        converse(talk, uncached(model, stateful), 60, lambda: evict_some(server, talk))


def evict_some(server: CacheServer, talk: Talk) -> None:
    """Pages go from the device, from the host or from both, in no order."""
    what = talk.random.integers(6)
    if what == 0:
        server.forget_devices()
    elif what == 1:
        for slot in talk.random.integers(0, server.planner.shape.pages, 3).tolist():
            server.planner.invalidate(slot)
    elif what == 2:
        server.reset()


def test_what_is_evicted_between_turns_is_computed(model: Path, stateful: bool) -> None:
    with served(model, stateful=stateful, pages=30, num_kv_blocks=40) as server:
        talk = talk_of(server, seed=1)
        converse(talk, uncached(model, stateful), 60, lambda: evict_some(server, talk))


def test_a_turn_hits_on_another_engine_than_stored_it(model: Path, stateful: bool) -> None:
    with served(model, stateful=stateful) as server:
        prompt = list(range(200)) * 4
        server.submit(0, request(0, prompt))
        first = run(server, 0)[0]
        server.submit(1, request(0, prompt))
        assert run(server, 1)[0] == first
        assert server.hit(0) == (0, 640 if stateful else 768)


@pytest.mark.parametrize("answer", [300, 1000])
def test_what_an_answer_added_is_reused_by_the_next_turn(model: Path, stateful: bool, answer: int) -> None:
    """On the engine that answered and on another one. One that goes on from the middle needs a state from there."""
    with served(model, stateful=stateful) as server:
        talk, alone = talk_of(server, max_tokens=answer), uncached(model, stateful)
        prompt = talk.new_tokens(500)
        server.submit(0, request(0, prompt, answer))
        said = prompt + run(server, 0)[0]
        whole = len(said) // 128 * 128
        middle = 384 if stateful else whole - 256  # the prompt's last boundary
        cuts = [(0, None, whole), (1, None, whole), (0, whole - 9, whole - 128), (1, whole - 130, middle)]
        for rank, cut, reused in cuts:
            following = request(0, said[:cut] + talk.new_tokens(200), 12)
            server.submit(rank, following)
            assert run(server, rank)[0] == answer_alone(alone, following)
            assert sum(server.hit(0)) == reused


HARMS = [("page", False), ("page", True), ("state", True)]


@pytest.mark.parametrize(("harm", "stateful"), HARMS)
def test_a_wrong_byte_on_the_host_changes_the_answer(model: Path, stateful: bool, harm: str) -> None:
    """The negative control: what is loaded is what is answered from."""
    with served(model, stateful=stateful) as server:
        prompt = list(range(200)) * 4
        server.submit(0, request(0, prompt))
        first = run(server, 0)[0]
        server.forget_devices()
        server.harm(pages=server.slots(prompt)[4:5] if harm == "page" else [], states=harm == "state")
        server.submit(0, request(0, prompt))
        assert run(server, 0)[0] != first


@pytest.mark.parametrize(("harm", "stateful"), HARMS)
def test_a_wrong_byte_that_a_checksum_shows_does_not(model: Path, stateful: bool, harm: str) -> None:
    with served(model, stateful=stateful, verify_loads=True) as server:
        prompt = list(range(200)) * 4
        server.submit(0, request(0, prompt))
        first = run(server, 0)[0]
        server.submit(1, request(0, prompt[:300]))  # two pages stay on the other device: they are shared, then undone
        run(server, 1)
        server.harm(pages=server.slots(prompt)[4:5] if harm == "page" else [], states=harm == "state")
        server.submit(1, request(0, prompt))
        assert run(server, 1)[0] == first
        event = server.loaded[0, 1]
        assert event.bad == (4 if harm == "page" else 5)
        assert (event.device_tokens, event.host_tokens) == ((0, 0) if stateful else (256, 256))


def test_one_whose_state_is_bad_computes_into_blocks_of_its_own(model: Path) -> None:
    with served(model, stateful=True, engines=1, verify_loads=True) as server:
        engine, prompt = server.engines[0], list(range(200)) * 4
        server.submit(0, request(0, prompt))
        run(server, 0)
        server.submit(0, request(1, prompt, 500))  # holds eleven blocks, five of them for others to share
        for _ in range(5):
            server.step(0)
        assert server.hit(1) == (640, 0)
        server.harm(states=True)
        server.submit(0, request(2, prompt, 20))
        for _ in range(3):
            server.step(0)
        assert (server.loaded[2, 1].bad, engine.stats().blocks_used) == (5, 11 + 7)
        run(server, 0)


@pytest.mark.parametrize(
    "fault", ["load_error_every=2", "store_error_every=2", "short_copy_every=3", "flip_byte_every=3"]
)
def test_faults_of_copies_change_no_answer(
    model: Path, stateful: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    with served(model, stateful=stateful, verify_loads=True, num_kv_blocks=40) as server:
        talk = talk_of(server)
        converse(talk, uncached(model, stateful), 40)
        assert sum(counts.errors for counts in server.planner.counts.values()) > 0


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 40), st.integers(0, 8), st.booleans()), min_size=1, max_size=8
    ),
    st.booleans(),
)
def test_a_cancel_in_any_phase_leaves_nothing(
    model: Path, plan: list[tuple[int, int, int, bool]], stateful: bool
) -> None:
    """Requests of one prompt's beginnings, each cancelled before the step of its number, if it still runs by then."""
    prompt = list(range(250)) * 3
    with served(model, stateful=stateful, engines=1, num_kv_blocks=14, max_num_batched_tokens=100) as server:
        engine = server.engines[0]
        for slot, (length, count, _, reuse) in enumerate(plan):
            server.submit(0, request(slot, prompt[:length], count), reuse=reuse)
        step = 0
        while engine.has_work():
            for slot, (*_, when, _) in enumerate(plan):
                if when == step and engine.cancel(slot, 1):
                    assert not engine.cancel(slot, 1)
            server.step(0)
            step += 1
        assert len(server.loaded) == len(plan)


def test_twelve_clients_on_a_pool_of_one_prompt_all_get_their_answers(model: Path, stateful: bool) -> None:
    """Each turn's prompt takes ten of eleven blocks, on the device and on the host."""
    with served(model, stateful=stateful, engines=1, pages=11, num_kv_blocks=11, max_num_seqs=12) as server:
        alone = uncached(model, stateful)
        prompts = {slot: [slot, *range(3, 250), *([slot] * 800)] for slot in range(12)}
        for turn in range(3):
            asked = {slot: request(slot, ids[: 900 + 60 * turn], 20) for slot, ids in prompts.items()}
            for submit in asked.values():
                server.submit(0, submit)
            answers = run(server, 0)
            for slot, submit in asked.items():
                assert answers[slot] == answer_alone(alone, submit)
            assert sum(event.deferred for event in server.loaded.values()) > 0
            server.check_settled()


def test_a_request_without_a_plan_reuses_and_leaves_nothing(model: Path) -> None:
    with served(model, stateful=False) as server:
        engine = server.engines[0]
        for _ in range(2):
            engine.add(request())
            while engine.has_work():
                assert engine.step().events == []
        stats = engine.stats()
        assert (stats.prefill_tokens, stats.blocks_cached) == (400, 0)


def test_cached_blocks_are_counted_and_given_up_when_others_need_them(model: Path) -> None:
    with served(model, stateful=False, engines=1, num_kv_blocks=6) as server:
        engine = server.engines[0]
        server.submit(0, request(0, list(range(200)) * 2, 10))
        run(server, 0)
        assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (0, 3)
        server.submit(0, request(0, [5] * 600, 10))
        run(server, 0)
        assert engine.stats().blocks_cached == 4 + 1
