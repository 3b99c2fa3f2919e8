"""The frontend bench: its baseline answers as the engine does, its instruments read true, and it runs end to end."""

from __future__ import annotations

import http.client
import json
import math
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.baselines.counters import Counters
from bench.baselines.queue_engine import launch
from bench.baselines.window_text import WindowText
from bench.streaming.model import write_model
from bench.streaming.probe import Probe
from bench.streaming.reading import bucket_quantile, quantile
from bench.streaming.server_process import ROOT, ServerError, ServerProcess
from engine.fake import FakeEngine
from engine.fake_settings import FakePace
from ipc.messages import Sampling, Submit
from tests.byte_tokenizer import byte_tokenizer

PROMPT = [5, 6, 7]
SEED = 3
LENGTH = 40
COMPLETION = {"prompt": PROMPT, "max_tokens": LENGTH, "seed": SEED, "ignore_eos": True}
# More than a slow engine could give within this test.
ENDLESS = {"prompt": PROMPT, "max_tokens": 8000, "stream": True, "ignore_eos": True}
SLOW = {"DEEPINFER_FAKE_STEP_MS": "20"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bench") / "words")


@pytest.fixture(scope="module")
def baseline(model: Path) -> Iterator[ServerProcess]:
    with _baseline(model, SLOW, model.parent / "baseline.log") as server:
        server.wait_ready()
        yield server


def _baseline(model: Path, environ: dict[str, str], log: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-m", "bench.baselines.fastapi_server", "--model", str(model)], environ, log)


def _post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def _chunks(text: str) -> list[dict[str, Any]]:
    *events, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def _expected(model: Path) -> str:
    """What the engine says, without any server."""
    engine = FakeEngine(launch(str(model), 1), FakePace())
    prompt = np.array(PROMPT, "<i4").tobytes()
    engine.add(Submit(0, 0, "", prompt, LENGTH, Sampling(SEED), ignore_eos=True))
    ids = [token for _ in range(LENGTH) for token in engine.step().records["token"].tolist()]
    assert not engine.has_work()
    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids)


def test_baseline_answers_as_the_engine_does(baseline: ServerProcess, model: Path) -> None:
    before = baseline.sample().tokens
    status, text = _post(baseline, "/v1/completions", COMPLETION)
    choice = json.loads(text)["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, _expected(model), "length")
    assert baseline.sample().tokens - before == LENGTH


def test_baseline_streams_one_chunk_a_token(baseline: ServerProcess, model: Path) -> None:
    chunks = _chunks(_post(baseline, "/v1/completions", COMPLETION | {"stream": True})[1])
    assert len(chunks) == LENGTH
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == _expected(model)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (LENGTH - 1) + ["length"]


def test_baseline_chats_as_it_completes_the_rendered_text(baseline: ServerProcess) -> None:
    options = {"max_tokens": 8, "seed": SEED, "ignore_eos": True}
    messages = [{"role": "user", "content": "hello"}]
    text = json.loads(_post(baseline, "/v1/completions", options | {"prompt": "user: hello\n"})[1])
    chat = json.loads(_post(baseline, "/v1/chat/completions", options | {"messages": messages})[1])
    chunks = _chunks(_post(baseline, "/v1/chat/completions", options | {"messages": messages, "stream": True})[1])
    said = text["choices"][0]["text"]
    assert said
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": said}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == said


def test_baseline_refuses_what_its_engine_refuses(baseline: ServerProcess) -> None:
    assert _post(baseline, "/v1/completions", COMPLETION | {"prompt": [10**6]})[0] == 400


def test_baseline_stops_for_a_client_that_left(baseline: ServerProcess) -> None:
    before = baseline.settle().tokens
    connection = http.client.HTTPConnection(baseline.host, baseline.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(ENDLESS), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(1)
    response.close()
    connection.close()
    assert baseline.settle().tokens > before


def test_engine_of_a_killed_baseline_ends(model: Path, tmp_path: Path) -> None:
    with _baseline(model, {}, tmp_path / "log") as server:
        server.wait_ready()
        children = psutil.Process(server.pid).children()
        assert children
        psutil.Process(server.pid).kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        ServerProcess([sys.executable, "-c", "exit('no such model')"], {}, tmp_path / "log") as server,
        pytest.raises(ServerError, match="no such model"),
    ):
        server.wait_ready()


# U+FFFD itself is held back as if it were half a character: the window cannot tell. Special tokens, which no text
# without "|" spells, are no text.
@given(st.text(st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}|")))
def test_window_text_joins_to_the_whole(text: str) -> None:
    tokenizer = byte_tokenizer()
    window = WindowText(tokenizer.decode)
    assert "".join(map(window.push, tokenizer.encode(text, add_special_tokens=False).ids)) == text


def _serve_once(answer: bytes, piece: int) -> tuple[int, threading.Thread]:
    """Send an answer in pieces of so many bytes to the first client of the port, then hang up."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(65536)
            for start in range(0, len(answer), piece):
                connection.sendall(answer[start : start + piece])

    thread = threading.Thread(target=serve)
    thread.start()
    return port, thread


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_probe_sees_every_chunk_once_however_it_is_cut(piece: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b'14\r\ndata: {"text":"x"}\n\n\r\n' * 5 + b"data: [DONE]\n\n"
    port, thread = _serve_once(answer, piece)
    probe = Probe("127.0.0.1", port, "/", b"{}")
    probe.start()
    thread.join(30)
    probe.join(30)
    with pytest.raises(ServerError, match=r"Connection(Refused|Reset)Error"):  # it asked again, and nobody was there
        probe.finish()
    assert len(probe.arrivals[0]) == 5


def test_probe_counts_gaps_within_one_answer_and_within_the_window() -> None:
    probe = Probe("127.0.0.1", 0, "/", b"")
    probe.arrivals = [[1.0, 2.0, 4.0], [5.0, 5.0, 9.0]]
    assert probe.gaps(1.5, 8.0) == [2.0, 0.0]
    assert probe.count(5.0) == 5


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.75, 3), (0.99, 4), (0.0, 1)])
def test_quantile_is_a_value_that_occurred(share: float, value: float) -> None:
    assert quantile([4, 1, 3, 2], share) == value


def test_quantiles_of_nothing_are_not_numbers() -> None:
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(bucket_quantile({0.1: 0, math.inf: 0}, 0.5))


@given(st.lists(st.floats(0, 0.9), min_size=1), st.floats(0.01, 1))
def test_bucket_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = (0.1, 0.3, 1.0)
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in (*bounds, math.inf)}
    true = quantile(values, share)
    above = next(bound for bound in bounds if true <= bound)
    below = max(bound for bound in (0.0, *bounds) if bound < above)
    assert below <= bucket_quantile(buckets, share) <= above + 1e-9


def test_bucket_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert bucket_quantile({0.1: 1, 1.0: 1, math.inf: 9}, 0.99) == 1.0


def test_counters_write_all_their_buckets() -> None:
    lines = Counters().expose().splitlines()
    assert lines[0] == "deepinfer:completion_tokens_total 0"
    assert lines[-1] == 'deepinfer:loop_lag_seconds_bucket{le="+Inf"} 0'


def _bench(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110, **options
    )


def test_bench_without_wrk_says_how_to_get_it() -> None:
    done = _bench(["-m", "bench.frontend"], env={"PATH": ""})
    assert done.returncode == 2
    assert "apt-get install wrk" in done.stderr


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--streams", "0"], ["--window", "nan"]])
def test_bench_refuses_a_plan_without_a_measurement(option: list[str]) -> None:
    done = _bench(["bench/frontend.py", *option])
    assert done.returncode == 2
    assert f"{' '.join(option)} is not above 0" in done.stderr


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_bench_measures_both_servers() -> None:
    done = _bench(["bench/frontend.py", "--streams", "2", "--regimes", "flat-out", "--rounds", "1", "--window", "0.5"])
    assert done.returncode == 0, done.stderr
    baseline, ours, ceiling = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (baseline["server"], ours["server"], ceiling["server"]) == ("baseline", "ours", "send")
    for row in (baseline, ours):
        assert row["tokens_s"] > 0
        assert row["server_us"] > 0
        # All that was counted crossed the wire: a chunk's JSON alone is longer than this.
        assert row["bytes_token"] > 100
