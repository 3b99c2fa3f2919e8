"""The offline matrix: a row a cell, times of the tokens that an engine really gave, flags that do not fit refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.offline_matrix import Matrix, Times, main, run
from tests import tiny_models
from tests.byte_tokenizer import write_model
from tests.fake_engine import engine_of

CELLS = [(3, 1), (3, 2), (130, 1), (130, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("matrix") / "tiny")


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, float]]:
    assert main([*flags, "--input-lens", "3", "130", "--batches", "1", "2", "--output-len", "4"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["name"] == "offline_matrix"
    rows: list[dict[str, float]] = line["rows"]
    return rows


def test_every_cell_is_measured(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--engine", "fake", "--model", str(model))
    assert [(row["input"], row["batch"]) for row in rows] == CELLS
    for row in rows:
        assert 0 < row["TTFT p50 ms"] <= row["TTFT max ms"]
        assert 0 < row["TPOT p50 ms"] <= row["TPOT max ms"]


def test_the_native_engine_is_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.write("llama", tmp_path / "llama")
    rows = measured(capsys, "--model", str(folder), "--threads", "1")
    assert [(row["input"], row["batch"]) for row in rows] == CELLS


def test_times_are_those_of_every_token(model: Path) -> None:
    times = run(engine_of(model), np.arange(60, dtype=np.int32).reshape(3, 20), 5)
    assert [len(one.tokens) for one in times] == [5, 5, 5]
    for one in times:
        assert one.tokens == sorted(one.tokens)
        assert one.first > 0
    assert Times([2.0, 3.0, 6.0]).between == 2.0


def test_the_pool_holds_the_largest_cell() -> None:
    assert Matrix((128, 250), (1, 3), 6).blocks == 6
    assert Matrix((128, 250), (1, 3), 7).blocks == 9


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--input-lens", "5", "0"], "--input-lens 0 is below 1"),
        (["--batches", "-1"], "--batches -1 is below 1"),
        (["--output-len", "1"], "--output-len 1 is below 2"),
        (["--input-lens", "1000000"], "--input-lens 1000000 and --output-len 16 exceed the model's context of"),
    ],
)
def test_flags_that_do_not_fit_are_told(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["--engine", "fake", "--model", str(model), *flags]) == 2
    assert told in capsys.readouterr().err
