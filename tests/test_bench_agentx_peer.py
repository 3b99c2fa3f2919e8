"""The replay bench against a peer: another server, of which nothing is asked that it need not know.

The peer keeps every whole page of every prompt, found by comparing prompts character by character, so that its cached
share is what the bench's ceiling must be.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest

from bench.agentx.ceiling import PAGE
from bench.agentx.record import saved
from bench.replay_agentx import main
from tests.byte_tokenizer import write_model

KEY: Final = "peer-key"
MADE: Final = "conversations=2,turns=8,scale=0.002,prefix=100000"
# A character that no text of the bench has stands for each special token of the template.
START, END = "\x01", "\x02"


class Peer(ThreadingHTTPServer):
    """Keeps what it was asked, and answers one token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        self.prompts: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, body: dict[str, Any], session: str) -> dict[str, Any]:
        """Note a request; its usage."""
        said = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in body["messages"])
        prompt = f"{said}{START}assistant\n"
        with self.lock:
            longest = max((_shared(prompt, earlier) for earlier in self.prompts), default=0)
            self.bodies.append(body)
            self.sessions.append(session)
            self.prompts.append(prompt)
        cached = min(longest, len(prompt) - 1) // PAGE * PAGE
        return {
            "prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    different = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(one), len(other)))


class Handler(BaseHTTPRequestHandler):
    server: Peer

    def do_GET(self) -> None:
        self._answer(json.dumps({"object": "list", "data": [{"id": "peer", "object": "model"}]}))

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = self.server.take(body, self.headers["X-Correlation-ID"])
        chunks = [{"choices": [{"index": 0, "delta": {"content": "x"}}]}, {"choices": [], "usage": usage}]
        self._answer("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def flags(peer: Peer, tmp_path: Path) -> list[str]:
    model = write_model(tmp_path / "model")
    return ["--url", peer.url, "--api-key", KEY, "--tokenizer", str(model), "--ignore-delays", "--synthetic", MADE]


def test_only_standard_fields_are_sent(peer: Peer, flags: list[str]) -> None:
    assert main(flags) == 0
    for body in peer.bodies:
        assert set(body) == {
            "model", "messages", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos",
        }  # fmt: skip
        assert (body["model"], body["temperature"], body["stream"], body["ignore_eos"]) == ("peer", 0, True, True)
        assert body["stream_options"] == {"include_usage": True}
        assert body["max_tokens"] >= 1
        assert all(set(message) == {"role", "content"} for message in body["messages"])
        assert body["messages"][-1]["role"] == "user"


def test_flags_add_and_drop_fields(peer: Peer, flags: list[str]) -> None:
    assert main([*flags, "--bypass-cache", "--no-ignore-eos", "--max-requests", "2", "--model", "other"]) == 0
    for body in peer.bodies:
        assert body["prefix_cache"] is False
        assert "ignore_eos" not in body
        assert body["model"] == "other"


def test_a_session_has_one_marker_and_one_name(peer: Peer, flags: list[str]) -> None:
    assert main([*flags, "--lanes", "2", "--passes", "2"]) == 0
    openings = {
        session: {body["messages"][0]["content"][:21] for _, body in asked}
        for session, asked in groupby(sorted(zip(peer.sessions, peer.bodies, strict=True), key=str), lambda one: one[0])
    }
    assert len(openings) == 4  # two sessions, each replayed twice
    assert all(found == {f"[rid:{session.removeprefix('agentx-')}]\n\n1"} for session, found in openings.items())


def test_the_same_seed_sends_the_same_prompts(peer: Peer, flags: list[str]) -> None:
    for seed in ("7", "7", "8"):
        assert main([*flags, "--seed", seed, "--lanes", "2"]) == 0
    size = len(peer.prompts) // 3
    first, second, third = (sorted(peer.prompts[at * size : (at + 1) * size]) for at in range(3))
    assert first == second
    assert not set(first) & set(third)


@pytest.mark.parametrize("lanes", ["1", "3"])
def test_the_ceiling_is_what_a_server_that_forgets_nothing_serves(
    peer: Peer, flags: list[str], lanes: str, tmp_path: Path
) -> None:
    """Also where requests overtake each other: pages are counted once, whoever of two is the first."""
    assert main([*flags, "--lanes", lanes, "--passes", "2", "--json", str(tmp_path / "run.json")]) == 0
    run = saved(tmp_path / "run.json")
    assert run.summary["drift_sent"] == {"min": 0, "mean": 0.0, "max": 0}
    assert run.summary["cached_share"] > 0.5
    assert run.summary["cached_of_ceiling"] == pytest.approx(1.0, abs=0.005)
