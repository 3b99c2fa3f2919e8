"""Ranks that die or hang: their requests end with an error, the others go on, and the rank comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from ipc.link_memory import LinkShape
from server.rank import REQUESTS_AHEAD
from tests.byte_tokenizer import write_model
from tests.serving import DEADLINE_S, RunningServer, alive, eventually
from tests.test_end_to_end_lifecycle import ENDLESS, SLOW, TEXT, client_of, open_stream, rest_of

WRITE_CURSOR: Final = 128  # bytes from the start of a ring; the engine writes one of each
READ_CURSOR: Final = 256
# Imported by every Python that finds it: an engine that leaves helpers, one of them not its own child.
FORKING: Final = """
import subprocess, sys
if "engine" in sys.orig_argv:
    subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    flags = ["--dp", "2", "--step-timeout", "3", "--routing", "least-loaded"]  # so that requests alternate
    with RunningServer(model, *flags, environ=SLOW) as running:
        yield running


@pytest.fixture
def forking(tmp_path: Path) -> dict[str, str]:
    """The environment that makes engines fork helpers."""
    (tmp_path / "sitecustomize.py").write_text(FORKING)
    return {"PYTHONPATH": str(tmp_path)}


def first_unhealthy(server: RunningServer) -> dict[str, Any]:
    """What /health says when it first says 503."""
    found: dict[str, Any] = {}

    def unhealthy() -> bool:
        status, health = server.get("/health")
        found.update(health)
        return status == 503

    eventually(unhealthy, "/health is 503")
    return found


async def check_lost_and_back(server: RunningServer, rank: int, by: signal.Signals, reason: str) -> None:
    """Hit a rank while both work; `reason` is what its clients and /health are told."""
    failures, errors = server.metric("rank_failures_total"), server.metric("errors_total")
    async with client_of(server) as client:
        streams = [await open_stream(client, **ENDLESS) for _ in range(2)]  # one a rank, in order
        many = await open_stream(client, **{**ENDLESS, "prompt": [[3], [4]]})  # one on each
        await asyncio.to_thread(eventually, lambda: server.metric("slots_used") == 4, "all are placed")
        unhealthy = asyncio.create_task(asyncio.to_thread(first_unhealthy, server))
        os.kill(server.rank_pid(rank), by)
        for stream in (streams[rank], many):
            error = (await rest_of(stream))[-1]["error"]
            assert error["code"] == "rank_lost"
            assert f"rank {rank} was lost ({reason}" in error["message"]
        health = await unhealthy
        assert (health["status"], health["ready_ranks"]) == ("degraded", 1)
        assert health["ranks"][rank]["state"] == "lost"
        assert reason in health["ranks"][rank]["reason"]
        async with client.post(TEXT, json={"prompt": [1], "max_tokens": 2}) as answer:
            assert answer.status == 200, "the other rank serves"
        assert b'"text":' in await streams[1 - rank].content.readuntil(b"\n\n"), "and goes on with what it had"
        streams[1 - rank].close()
        await asyncio.to_thread(server.wait_healthy)
    await asyncio.to_thread(server.wait_idle)
    assert server.metric("rank_failures_total") == failures + 1
    assert server.metric("rank_restarts", dp_rank=str(rank)) >= 1
    assert server.metric("errors_total") > errors
    assert "Traceback" not in server.log()


async def test_a_killed_rank_is_replaced_and_leaks_no_descriptor(server: RunningServer) -> None:
    watched = psutil.Process(server.pid)
    await check_lost_and_back(server, 0, signal.SIGKILL, "killed by SIGKILL")
    before, victim = watched.num_fds(), server.rank_pid(0)
    await check_lost_and_back(server, 0, signal.SIGKILL, "killed by SIGKILL")
    assert not psutil.pid_exists(victim)
    await asyncio.to_thread(eventually, lambda: watched.num_fds() <= before, "no more descriptors than before")


async def test_a_stopped_rank_counts_as_hung_and_is_replaced(server: RunningServer) -> None:
    victim = server.rank_pid(1)
    await check_lost_and_back(server, 1, signal.SIGSTOP, "hung: no sign of life for ")
    assert not psutil.pid_exists(victim)


async def test_a_whole_answer_on_a_lost_rank_is_a_500(server: RunningServer) -> None:
    async with client_of(server) as client:
        answer = asyncio.create_task(client.post(TEXT, json=ENDLESS))
        await asyncio.to_thread(eventually, lambda: server.metric("slots_used", dp_rank="0") == 1, "it is placed")
        os.kill(server.rank_pid(0), signal.SIGKILL)
        async with await answer as lost:
            assert lost.status == 500
            error = (await lost.json())["error"]
    assert (error["code"], error["type"]) == ("rank_lost", "server_error")
    await asyncio.to_thread(server.wait_healthy)


async def test_who_waits_before_a_rank_that_dies_is_served_by_another(model: Path) -> None:
    flags = ["--dp", "2", "--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--routing", "least-loaded"]
    with RunningServer(model, *flags, environ=SLOW) as server:
        async with client_of(server) as client, client_of(server) as other:
            places = 2 * (1 + REQUESTS_AHEAD)
            running = [asyncio.create_task(client.post(TEXT, json=ENDLESS)) for _ in range(places)]
            await asyncio.to_thread(eventually, lambda: server.metric("slots_used") == places, "the ranks are full")
            short = {"prompt": [1], "max_tokens": 2, "ignore_eos": True}
            waiting = [asyncio.create_task(other.post(TEXT, json=short)) for _ in range(6)]
            await asyncio.to_thread(eventually, lambda: server.metric("line_requests", dp_rank="0") == 3, "some wait")
            os.kill(server.rank_pid(0), signal.SIGKILL)
            await asyncio.to_thread(eventually, lambda: server.metric("line_requests", dp_rank="1") == 6, "all moved")
            for task in running:
                task.cancel()
            for task in waiting:
                async with await task as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"] == 2
            await asyncio.gather(*running, return_exceptions=True)
            for task in running:
                if not task.cancelled() and task.exception() is None:
                    task.result().close()


def test_helpers_that_an_engine_forked_end_with_it(model: Path, forking: dict[str, str]) -> None:
    with RunningServer(model, environ=forking) as server:
        for _ in range(2):
            rank = server.rank_pid(0)
            eventually(lambda: len(server.family()) == 4, "the rank has forked its helpers")
            family = server.family() - {server.pid}
            os.kill(rank, signal.SIGKILL)
            # Not even zombies stay: the server has become their parent, nobody else would collect them.
            eventually(lambda family=family: not any(map(psutil.pid_exists, family)), "all are gone")  # type: ignore[misc]
            eventually(lambda rank=rank: server.rank_pid(0) != rank, "the rank is started again")  # type: ignore[misc]
            server.wait_healthy()
        eventually(lambda: len(server.family()) == 4, "the rank has forked its helpers")


def exit_status_after(server: RunningServer, rank: int) -> int:
    os.kill(server.rank_pid(rank), signal.SIGKILL)
    return server.process.wait(DEADLINE_S)


def test_on_rank_failure_exit_ends_the_server_with_status_1(model: Path) -> None:
    with RunningServer(model, "--dp", "2", "--on-rank-failure", "exit") as server:
        family = server.family()
        assert exit_status_after(server, 1) == 1
        assert "engine rank 1 was lost (killed by SIGKILL); the server ends" in server.log()
        assert not any(map(psutil.pid_exists, family - {server.pid}))


def test_a_rank_that_never_comes_back_ends_the_server(tmp_path: Path) -> None:
    model = write_model(tmp_path / "vanishing")
    with RunningServer(model) as server:
        (model / "config.json").unlink()
        assert exit_status_after(server, 0) == 1
        assert server.log().count("started as process") == 4
        assert "No such file or directory" in server.log()
        assert not alive(server.rank_pid(0))


@pytest.mark.parametrize(
    "at", [LinkShape().submit_at + READ_CURSOR, LinkShape().token_at + WRITE_CURSOR], ids=["submit ring", "token ring"]
)
def test_a_rank_that_scribbles_over_its_rings_is_replaced(server: RunningServer, at: int) -> None:
    victim = server.rank_pid(0)
    with link_memory(victim).open("r+b", buffering=0) as memory:
        memory.seek(at)
        memory.write((2**63).to_bytes(8, "little"))
    eventually(lambda: server.rank_pid(0) != victim, "the rank is replaced")
    assert re.search(r"engine rank 0 was lost \(.*(link is broken|RingCorruptError)", server.log())
    server.wait_healthy()
    server.wait_idle()


def link_memory(rank: int) -> Path:
    """The shared segment, as the rank has it open."""
    links = Path(f"/proc/{rank}/fd").iterdir()
    return next(link for link in links if str(link.readlink()).startswith("/memfd:deepinfer-link"))


def test_a_rank_that_cannot_be_started_again_ends_the_server(model: Path) -> None:
    with RunningServer(model) as server:
        psutil.Process(server.pid).rlimit(psutil.RLIMIT_NOFILE, (4, 4))
        assert exit_status_after(server, 0) == 1
        assert "engine rank 0 cannot be started again: " in server.log()


async def test_a_rank_that_asks_to_leave_is_replaced(server: RunningServer) -> None:
    async with client_of(server) as client:
        stream = await open_stream(client, **ENDLESS)
        os.kill(server.rank_pid(0), signal.SIGTERM)
        error = (await rest_of(stream))[-1]["error"]
    assert "exited with status 0" in error["message"]
    await asyncio.to_thread(server.wait_healthy)
