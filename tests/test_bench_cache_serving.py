"""The bench of hits and of decodes beside copies: every tier is hit, every side computes the same, a line a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from bench.cache_serving import main
from bench.caching.beside import Load
from bench.caching.calls import Reply
from bench.caching.hits import Shape, Times
from tests.byte_tokenizer import write_model

# A fake engine whose prompts and steps take as long as a real one's, in small.
PACE: Final = {"DEEPINFER_FAKE_STEP_MS": "4", "DEEPINFER_FAKE_PREFILL_TOKENS_PER_S": "20000"}
SMALL: Final = ["--engine", "fake", "--first-id", "0", "--last-id", "128", "--hicache-size-gb", "0.001"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cache_serving") / "tiny")


def measured(model: Path, capsys: pytest.CaptureFixture[str], part: str, *flags: str) -> list[dict[str, Any]]:
    assert main(["--model", str(model), *SMALL, "--parts", part, "--rounds", "1", *flags]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["name"] == f"cache_serving {part}"
    rows: list[dict[str, Any]] = line["rows"]
    return rows


def reply(ttft_s: float, cached: int) -> Reply:
    return Reply(ttft_s, 1000, device=0, host=cached)


def test_a_hit_is_measured_by_what_it_has_less_to_compute_than_the_misses_beside_it() -> None:
    times = Times()
    for miss_s, hit_s in ((2.0, 0.5), (4.0, 0.5), (6.0, 1.0)):
        times.misses.append(reply(miss_s, 0))
        times.hit("host", reply(hit_s, 900))
    (row,) = times.rows()  # 3 / 0.5, 5 / 0.5, 6 / 1
    assert (row["computed"], row["faster"], row["less computed"], row["share"]) == (100, 6.0, 10.0, 0.6)
    assert (row["miss ms"], row["hit ms"], row["as promised"]) == (4000, 500, True)


def test_a_device_has_room_for_one_prompt_only() -> None:
    shape = Shape(pages=47, tails=[64, 256], rounds=1)
    assert shape.blocks == 50
    load = Load(streams=2, new_pages=4, conversations=4, pages=12, tail=32, window_s=10, rounds=1)
    assert load.small_device - 2 * 17 < 2 * load.pages < load.large_device - load.small_device


@pytest.mark.parametrize(("part", "cases"), [("hits", ["device", "host"]), ("ranks", ["host, other rank"])])
def test_hits_come_from_where_they_should(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    cases: list[str],
) -> None:
    for name, value in PACE.items():
        monkeypatch.setenv(name, value)
    rows = measured(model, capsys, part, "--pages", "6", "--tails", "30")
    assert [(row["case"], row["prompt"], row["computed"]) for row in rows] == [(case, 798, 30) for case in cases]
    assert all(row["hit ms"] > 0 for row in rows)


def test_decodes_are_watched_beside_the_same_prompts(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_FAKE_STEP_MS", "10")
    copies, on_device, no_cache = measured(model, capsys, "beside", "--window", "1.5")
    assert [row["case"] for row in (copies, on_device, no_cache)] == ["copies", "on device", "no cache"]
    assert copies["loaded/s"] > 0
    assert copies["stored/s"] > 0
    assert no_cache["stored/s"] == no_cache["loaded/s"] == on_device["loaded/s"] == 0
    assert on_device["stored/s"] > 0
    assert copies["copies: mean"] == copies["copies: p50"] == 0


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--pages", "-1"], ["--window", "0"], ["--tails", "0"]])
def test_flags_that_do_not_fit_are_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
