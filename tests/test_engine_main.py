"""`python -m engine` as a child process: what it says and how it ends when it cannot start, is stopped or orphaned."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache.pool import PoolFiles
from hicache.shape import PoolShape
from ipc.heartbeat import EngineState
from ipc.link import ServerLink
from ipc.messages import (
    CacheAttach,
    CacheForget,
    CacheLoaded,
    CachePlan,
    CacheStored,
    Event,
    Failed,
    Launch,
    LinkFds,
    Loaded,
    Ready,
    Shutdown,
    Stats,
)
from tests.byte_tokenizer import EOS, MAX_MODEL_LEN, VOCAB_SIZE, write_model
from tests.fake_engine import request
from tests.serving import DEADLINE_S, ROOT, alive, eventually

# The parent in between: it starts the rank as its own child, tells its pid and waits to be killed.
PARENT = """
import os, subprocess, sys
launch = sys.argv[1].replace('"parent_pid":0', f'"parent_pid":{os.getpid()}')
fds = tuple(map(int, sys.argv[2:]))
child = subprocess.Popen([sys.executable, "-m", "engine", launch], pass_fds=fds, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def link() -> Iterator[ServerLink]:
    made = ServerLink.create()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("main") / "bytes")


def launch_of(link: ServerLink, model: Path, **fields: Any) -> str:
    launch = Launch(0, 1, "fake", str(model), link.fds, **{"parent_pid": os.getpid(), **fields})
    return msgspec.json.encode(launch).decode()


def fds_of(fds: LinkFds) -> tuple[int, int, int]:
    return fds.segment, fds.to_engine, fds.to_server


def start(link: ServerLink, *argv: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine", *argv]
    passed = (*fds_of(link.fds), *fds)
    return subprocess.Popen(command, cwd=ROOT, pass_fds=passed, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what it wrote."""
    _, told = process.communicate(timeout=DEADLINE_S)
    return process.returncode, told


def next_event(link: ServerLink) -> Event:
    (event,) = next_events(link, 1)
    return event


def next_events(link: ServerLink, count: int) -> list[Event]:
    """Of those that are no statistics."""
    events: list[Event] = []

    def arrived() -> bool:
        events.extend(event for event in link.drain(1).events if not isinstance(event, Stats))
        return len(events) >= count

    eventually(arrived, "the rank says something")
    return events


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "error: one LAUNCH argument is expected, got 0"),
        (["{}", "more"], "error: one LAUNCH argument is expected, got 2"),
        (["{"], "error: LAUNCH cannot be read: Input data was truncated"),
        (["{}"], "error: LAUNCH cannot be read: Object missing required field `rank`"),
        (['{"rank":"first"}'], "error: LAUNCH cannot be read: Expected `int`, got `str` - at `$.rank`"),
    ],
)
def test_a_launch_that_cannot_be_read_ends_with_status_2(link: ServerLink, argv: list[str], told: str) -> None:
    assert ended(start(link, *argv)) == (2, told + "\n")


def test_a_missing_model_is_told_to_the_server(link: ServerLink, tmp_path: Path) -> None:
    status, told = ended(start(link, launch_of(link, tmp_path / "missing")))
    assert status == 1
    event = next_event(link)
    assert isinstance(event, Failed)
    assert re.search(r"No such file or directory: .*missing/config\.json", event.message)
    assert "Traceback" not in told  # the message says it all


def test_a_rank_says_its_facts_and_leaves_at_shutdown(link: ServerLink, model: Path) -> None:
    process = start(link, launch_of(link, model, max_num_seqs=3, num_kv_blocks=9))
    event = next_event(link)
    assert isinstance(event, Ready)
    facts = event.facts
    assert (facts.vocab_size, facts.eos_ids, facts.max_model_len) == (VOCAB_SIZE, (EOS,), MAX_MODEL_LEN)
    assert (facts.max_num_seqs, facts.num_blocks) == (3, 9)
    assert link.beat().pid == process.pid
    assert link.send(Shutdown())
    assert ended(process)[0] == 0


def test_sigterm_leaves_in_an_orderly_way_and_ctrl_c_does_nothing(link: ServerLink, model: Path) -> None:
    process = start(link, launch_of(link, model))
    assert isinstance(next_event(link), Ready)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def test_a_rank_whose_parent_was_gone_before_it_looked_does_nothing(link: ServerLink, model: Path) -> None:
    assert ended(start(link, launch_of(link, model, parent_pid=1))) == (1, "")
    assert link.drain(1).events == []


def test_a_rank_dies_with_its_parent(link: ServerLink, model: Path) -> None:
    fds = fds_of(link.fds)
    command = [sys.executable, "-c", PARENT, launch_of(link, model, parent_pid=0), *map(str, fds)]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        assert isinstance(next_event(link), Ready)
        assert alive(rank)
        parent.kill()
    eventually(lambda: not alive(rank), "the rank ended with its parent")


@pytest.fixture
def files() -> Iterator[PoolFiles]:
    made = PoolFiles.create()
    yield made
    made.close()


def start_with_pool(link: ServerLink, model: Path, files: PoolFiles) -> subprocess.Popen[str]:
    fds = files.fds
    return start(link, launch_of(link, model, pool=fds), fds=(fds.pages, fds.states))


def test_a_rank_with_a_pool_waits_for_its_size_and_copies_into_it(
    link: ServerLink, model: Path, files: PoolFiles
) -> None:
    process = start_with_pool(link, model, files)
    loaded = next_event(link)
    assert isinstance(loaded, Loaded)
    assert link.send(CacheForget())  # a reset that comes that early concerns nobody
    first = link.beat()
    assert (first.state, first.pid) == (EngineState.LOADING, process.pid)
    eventually(lambda: link.beat().time_ns > first.time_ns, "a later beat")
    assert link.drain(1).events == []
    shape = PoolShape(4, loaded.facts.page_bytes, 0, 0)
    pool = files.size(shape)
    assert link.send(shape.message())
    ready = next_event(link)
    assert isinstance(ready, Ready)
    assert ready.facts == loaded.facts
    plan = CachePlan(7, b"r" * 16, b"k" * 16, store=(2).to_bytes(4, "little"))
    assert link.send(msgspec.structs.replace(request(), cache=plan))
    loaded, stored = next_events(link, 2)
    assert loaded == CacheLoaded(7)
    assert isinstance(stored, CacheStored)
    assert (stored.plan, stored.pages, len(stored.sums)) == (7, 1, 8)
    assert pool.pages[2].any()
    assert not pool.pages[[0, 1, 3]].any()
    assert link.send(Shutdown())
    assert ended(process)[0] == 0
    pool.close()


@pytest.mark.parametrize("way", ["shutdown", "sigterm"])
def test_a_rank_that_waits_for_its_pool_can_be_told_to_leave(
    link: ServerLink, model: Path, files: PoolFiles, way: str
) -> None:
    process = start_with_pool(link, model, files)
    assert isinstance(next_event(link), Loaded)
    if way == "shutdown":
        assert link.send(Shutdown())
    else:
        process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    assert link.drain(1).events == []


def test_a_pool_that_is_smaller_than_told_ends_the_rank(link: ServerLink, model: Path, files: PoolFiles) -> None:
    process = start_with_pool(link, model, files)
    assert isinstance(next_event(link), Loaded)
    pool = files.size(PoolShape(1, 1024, 0, 0))
    assert link.send(CacheAttach(1000, 1024, 0, 0))
    assert ended(process)[0] == 1
    event = next_event(link)
    assert isinstance(event, Failed)
    assert "SegmentError" in event.message
    pool.close()
