"""Starting and stopping: signals, drains, ends that come too early, and nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from tests.byte_tokenizer import write_model
from tests.serving import DEADLINE_S, RunningServer, alive, eventually, start

SLOW: Final = {"DEEPINFER_FAKE_STEP_MS": "2"}
ENDLESS: Final = {"prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True}
TEXT: Final = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lifecycle") / "tiny")


@asynccontextmanager
async def client_of(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(server.address, timeout=timeout) as session:
        yield session


async def open_stream(client: aiohttp.ClientSession, **body: Any) -> aiohttp.ClientResponse:
    """A streamed answer whose first token has come."""
    answer = await client.post(TEXT, json={**body, "stream": True})
    assert answer.status == 200
    assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: {")
    return answer


async def rest_of(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The events of an open stream to its orderly end."""
    *events, done, nothing = (await answer.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


async def exit_status(server: RunningServer) -> int:
    return await asyncio.to_thread(server.process.wait, DEADLINE_S)


def test_ctrl_c_ends_a_server_like_sigterm(model: Path) -> None:
    with RunningServer(model, end_by=signal.SIGINT) as server:
        assert len(server.family()) == 2


def test_of_two_servers_on_one_port_one_serves_and_one_says_why(model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = f"--port={probe.getsockname()[1]}"
    with tempfile.TemporaryFile("w+") as log:
        # Started in the same moment: both may bind, only one may listen.
        both = [start(["--model", str(model), port], None, log.fileno()) for _ in range(2)]
        try:
            eventually(lambda: any(process.poll() is not None for process in both), "one of two servers ends")
            (loser,) = [process for process in both if process.poll() is not None]
            (winner,) = [process for process in both if process is not loser]
            assert loser.returncode == 2
            assert winner.stdout is not None
            assert winner.stdout.readline().startswith("ready: ")
        finally:
            for process in both:
                process.terminate()
                process.communicate(timeout=DEADLINE_S)
        log.seek(0)
        assert f"--port {port.removeprefix('--port=')}: cannot listen there" in log.read()


async def test_running_requests_end_before_the_server_does(model: Path) -> None:
    with RunningServer(model, environ=SLOW) as server:
        family = server.family()
        async with client_of(server) as client, client_of(server) as other:
            streams = [await open_stream(client, **{**ENDLESS, "max_tokens": 100}) for _ in range(3)]
            last = await open_stream(client, **ENDLESS)  # keeps the server up until all was seen
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(eventually, lambda: server.get("/health")[0] == 503, "it says that it stops")
            assert server.get("/health")[1]["status"] == "stopping"
            async with other.post(TEXT, json=ENDLESS) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"]
                assert (await refused.json())["error"]["code"] == "shutting_down"
            for stream in streams:
                events = await rest_of(stream)
                assert len(events) == 99
                assert events[-1]["choices"][0]["finish_reason"] == "length"
            last.close()
        assert await exit_status(server) == 0
    assert not [pid for pid in family if alive(pid)]


async def check_ended_by_error(server: RunningServer, signals: int) -> None:
    async with client_of(server) as client, client_of(server) as other:
        one = await open_stream(client, **ENDLESS)
        many = await open_stream(client, **{**ENDLESS, "prompt": [[1], [2], [3]]})
        whole = asyncio.create_task(other.post(TEXT, json=ENDLESS))
        await asyncio.to_thread(eventually, lambda: server.metric("slots_used") == 5, "all run")
        for number in range(1, signals + 1):
            server.process.send_signal(signal.SIGTERM)
            told = "shutting down" if number == 1 else "ending now"
            await asyncio.to_thread(eventually, lambda told=told: told in server.log(), told)  # type: ignore[misc]
        for stream in (one, many):
            assert (await rest_of(stream))[-1]["error"]["code"] == "shutting_down"
        async with await whole as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "shutting_down"
    assert await exit_status(server) == 0
    assert "Traceback" not in server.log()


async def test_requests_that_outlast_the_timeout_end_with_an_error_event(model: Path) -> None:
    with RunningServer(model, "--shutdown-timeout", "0.1", environ=SLOW) as server:
        await check_ended_by_error(server, signals=1)


async def test_a_second_signal_ends_them_at_once(model: Path) -> None:
    with RunningServer(model, "--shutdown-timeout", "3600", environ=SLOW) as server:
        await check_ended_by_error(server, signals=2)


def test_no_rank_survives_a_killed_server(model: Path) -> None:
    with RunningServer(model, "--dp", "2") as server:
        family = server.family()
        assert len(family) == 3
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(map(alive, family)), "the ranks ended with the server")


def ended(model: Path, *flags: str) -> tuple[int, str]:
    """Exit status and log of a server that cannot start."""
    with tempfile.TemporaryFile("w+") as log:
        process = start(["--model", str(model), *flags], None, log.fileno())
        assert process.communicate(timeout=DEADLINE_S)[0] == ""
        log.seek(0)
        return process.returncode, log.read()


def test_a_rank_that_cannot_load_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    model = write_model(tmp_path / "broken")
    (model / "config.json").write_text("{}")
    status, log = ended(model)
    assert status == 1
    assert "config.json: Object missing required field `vocab_size`" in log
    assert "the server ends" in log


def test_a_tokenizer_that_cannot_load_is_a_configuration_error(tmp_path: Path) -> None:
    model = write_model(tmp_path / "mute")
    (model / "tokenizer.json").unlink()
    status, log = ended(model)
    assert status == 2
    assert "error: --model: " in log
    assert "no tokenizer.json" in log


def test_a_taken_port_is_a_configuration_error(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, log = ended(model, "--port", str(port))
    assert status == 2
    assert f"error: --host 127.0.0.1 --port {port}: cannot listen there" in log
    assert "started as process" not in log
