"""The replay bench against a real server with a fake engine: every request sent, counted and reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from bench.agentx.errors import OptionError
from bench.agentx.record import Record, saved
from bench.agentx.settings import Settings, parse
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import Subagent, read, write
from bench.replay_agentx import main
from tests.byte_tokenizer import write_model
from tests.serving import ROOT, RunningServer

MADE = "conversations=3,turns=8,scale=0.002,prefix=30000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with RunningServer(model, environ={"DEEPINFER_FAKE_STEP_MS": "1"}) as running:
        yield running


@pytest.fixture
def flags(server: RunningServer, model: Path, tmp_path: Path) -> list[str]:
    return ["--url", server.address, "--tokenizer", str(model), "--ignore-delays", "--json", str(tmp_path / "run.json")]


def records(tmp_path: Path) -> list[Record]:
    return saved(tmp_path / "run.json").records


def requests_of(options: str) -> int:
    made = generate(Options.parse(options))
    return sum(len(one.requests) if isinstance(one, Subagent) else 1 for trace in made for one in trace.requests)


def test_all_requests_are_sent_and_counted_by_the_server(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--synthetic", MADE, "--lanes", "2", "--seed", "5", "--plots", str(tmp_path / "plots")]) == 0
    found = records(tmp_path)
    assert len(found) == requests_of(MADE)
    # The server counts the very tokens that were built here, and the recorded ones besides marker and template.
    assert all(record.prompt_tokens == record.sent_tokens > record.trace_in for record in found)
    assert all(record.completion_tokens == max(1, record.trace_out) for record in found)
    assert all(record.error == "" and record.ttft is not None for record in found)
    assert 0 < sum(record.cached_tokens for record in found) < sum(record.prompt_tokens for record in found)
    assert any(record.shared_pages for record in found)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["name"], line["settings"]["seed"], line["settings"]["model"]) == ("replay_agentx", 5, "tiny")
    assert line["summary"]["requests"] == len(found)
    assert line["summary"]["drift_sent"] == {"min": 0, "mean": 0.0, "max": 0}
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3


def test_turns_of_a_conversation_follow_each_other(flags: list[str], tmp_path: Path) -> None:
    main([*flags, "--synthetic", MADE, "--lanes", "3"])
    by_conversation = lambda record: (record.session, record.number)  # noqa: E731
    for _, group in groupby(sorted(records(tmp_path), key=by_conversation), by_conversation):
        turns = sorted(group, key=lambda record: record.step)
        assert [turn.step for turn in turns] == list(range(len(turns)))
        ends = [turn.start + (turn.end or 0) for turn in turns]
        assert all(end <= turn.start for end, turn in zip(ends, turns[1:], strict=False))


def test_warm_up_and_bounds_are_kept(flags: list[str], tmp_path: Path) -> None:
    assert main([*flags, "--synthetic", MADE, "--lanes", "2", "--warmup", "3", "--max-requests", "40"]) == 0
    found = records(tmp_path)
    assert sum(record.warmup for record in found) == 6
    assert sum(not record.warmup for record in found) == 40
    assert {record.replay for record in found} == {0, 1}


def test_conversations_are_cut_where_they_do_not_fit(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 500
    main([*flags, "--synthetic", MADE, "--max-context", str(limit)])
    found = records(tmp_path)
    cut = requests_of(MADE) - len(found)
    assert 0 < cut < requests_of(MADE)
    assert f"{cut} turns were left out" in capsys.readouterr().out
    assert all(record.prompt_tokens + record.completion_tokens <= limit for record in found)
    assert main([*flags, "--synthetic", MADE, "--max-context", "100"]) == 2
    assert "--max-context 100: no session has a first turn that short" in capsys.readouterr().err


def test_scaled_traces_are_replayed(flags: list[str], tmp_path: Path) -> None:
    write(generate(Options(conversations=1, turns=8, scale=0.01, prefix=3000)), tmp_path / "traces")
    lengths = []
    for scale in ("1", "0.25"):
        assert main([*flags, str(tmp_path / "traces"), "--scale", scale, "--seed", "1"]) == 0
        found = {(record.number, record.step): record.trace_in for record in records(tmp_path)}
        lengths.append([size for _, size in sorted(found.items())])
    assert all(0 <= small - whole / 4 < 16 for whole, small in zip(*lengths, strict=True))


def test_failures_have_a_kind_and_a_status(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--synthetic", "conversations=1,turns=1,scale=0.001,prefix=0", "--model", "other"]) == 1
    assert "http 404" in capsys.readouterr().out


def test_an_overlong_prompt_ends_its_conversation(flags: list[str], tmp_path: Path) -> None:
    made = "conversations=1,turns=8,scale=0.002,prefix=4100000"
    assert main([*flags, "--synthetic", made, "--max-context", "100000"]) == 1
    kinds = {record.conversation: record.error for record in records(tmp_path) if record.conversation == "main"}
    assert kinds == {"main": "context length"}
    assert [record.step for record in records(tmp_path) if record.conversation == "main"] == [0]


def test_an_interrupt_still_reports(server: RunningServer, model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "bench/replay_agentx.py", "--url", server.address, "--tokenizer", str(model),
        "--synthetic", MADE, "--duration", "3600", "--idle-cap", "0.5", "--json", str(tmp_path / "run.json"),
    ]  # fmt: skip
    before = server.metric("requests_total")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as bench:
        while server.metric("requests_total") < before + 2:
            assert bench.poll() is None
        bench.send_signal(signal.SIGINT)
        out, _ = bench.communicate(timeout=60)
    assert bench.returncode == 0
    assert json.loads(out.splitlines()[-1])["summary"]["requests"] >= 1


def test_two_runs_are_compared(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for lanes in ("1", "2"):
        assert main([*flags, "--synthetic", MADE, "--seed", lanes, "--lanes", lanes, "--max-requests", "10"]) == 0
        files.append(str((tmp_path / "run.json").rename(tmp_path / f"lanes{lanes}.json")))
    capsys.readouterr()
    assert main(["--compare", *files, "--plots", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not the same work: lanes: A has 1, B has 2" in out
    assert json.loads(out.splitlines()[-1])["name"] == "replay_agentx_compare"
    assert (tmp_path / "compare.png").exists()
    assert main(["--compare", files[0], str(tmp_path / "gone.json")]) == 2


def test_made_traces_can_be_written_and_read(tmp_path: Path) -> None:
    assert main(["--synthetic", MADE, "--write-traces", str(tmp_path / "all")]) == 0
    assert read(tmp_path / "all") == generate(Options.parse(MADE))
    assert main([str(tmp_path / "all"), "--sessions", "2", "--write-traces", str(tmp_path / "two")]) == 0
    assert [trace.id for trace in read(tmp_path / "two")] == ["synthetic-0000", "synthetic-0001"]
    assert Options.parse(Options(turns=3).text) == Options(turns=3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lanes", "0"], "--lanes 0: must be above 0"),
        (["--idle-cap", "-1"], "--idle-cap -1.0: must not be negative"),
        (["--speedup", "nan"], "--speedup nan: must be above 0"),
        (["--scale", "1.5"], "--scale 1.5: must be above 0 and at most 1"),
        (["--passes", "0"], "--passes 0: without end"),
        (["folder", "--synthetic", "turns=1"], "--synthetic turns=1: traces are already read from folder"),
        (["--synthetic", "turn=1"], "--synthetic turn=1: one of conversations, turns"),
        (["--synthetic", "turns=x"], "--synthetic turns=x: 'x' is no int"),
        (["--synthetic", "turns=0"], "--synthetic turns=0: must be above 0"),
        (["--synthetic", "scale=0"], "--synthetic scale=0.0: must be above 0"),
        (["--synthetic", "prefix=-1"], "--synthetic prefix=-1: must not be negative"),
        (["nowhere"], "nowhere:0: no traces here"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_report_has_all_settings_but_secrets() -> None:
    settings, other = parse(["--api-key", "secret", "--duration", "5", "--no-ignore-eos", "--json", "x.json"])
    assert (settings.passes, settings.ignore_eos, other.compare) == (0, False, None)
    assert "secret" not in json.dumps(settings.public())
    unbounded: dict[str, Any] = Settings().public()
    assert unbounded["duration"] is None
    with pytest.raises(OptionError):
        Settings(ranks=-1)
