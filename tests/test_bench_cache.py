"""The cache bench: it runs, says what it should, and its rival finds what the planner finds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.cache import ROOT, RULES, main
from bench.cache_naive import NaiveIndex
from hicache.plan import Planner
from hicache.shape import PoolShape
from ipc.messages import CacheLoaded, CacheStored

SMALL = ["--pages", "200", "--tokens", "1000", "--turn", "200", "--rounds", "3"]


def test_it_prints_one_row_a_case_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["name"] == "cache"
    cases = [(row["way"], row["case"]) for row in line["rows"]]
    assert cases == [
        (way, case) for way in ("planner", "naive") for case in ("cold", "next turn", "next turn, no hint")
    ]
    assert all(row["look ms"] > 0 and row["share of 278 ms"].endswith("%") for row in line["rows"])


@pytest.mark.parametrize("more", [["--rounds", "0"], ["--tokens", "100"], ["--pages", "20"]])
def test_sizes_that_make_no_sense_are_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(SMALL + more)
    assert "--" in capsys.readouterr().err


def test_the_rival_finds_what_the_planner_finds() -> None:
    """On a pool that holds a third of all prompts, branching and coming back."""
    planner, naive = Planner(PoolShape(40, 4096, 0, 0), RULES), NaiveIndex(40)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 99, 128 * 12 + 1, np.int32) for _ in range(10)]
    hits = 0
    for turn in range(60):
        ids = prompts[int(rng.integers(10))][: 128 * int(rng.integers(1, 13)) + 1]
        look = planner.look(ROOT, ids)
        keys, pages, found = naive.look(ROOT, ids)
        assert found == look.cached_tokens // 128, turn
        hits += found
        plan = planner.plan(0, look, reuse=True)
        planner.loaded(0, CacheLoaded(plan.plan))
        stored = len(plan.store) // 4
        planner.stored(0, CacheStored(plan.plan, stored, bytes(8 * stored)))
        naive.done(naive.plan(ROOT, keys, pages, found))
    assert hits > 60
