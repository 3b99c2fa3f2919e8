"""The ring bench runs both ways, and its last line is JSON with every way across."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.report import table
from tests.ipc_twins import ROOT


@pytest.mark.parametrize("start", [["-m", "bench.ring"], ["bench/ring.py"]], ids=["module", "path"])
def test_the_bench_reports(start: list[str]) -> None:
    command = [sys.executable, *start, "--steps", "20", "--turns", "1", "--idle", "0.01"]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["name"] == "ring"
    assert {"cpu", "cores", "python", "system"} <= set(line["machine"])
    assert len(line["date"]) == len("2030-01-01T00:00:00+00:00")
    ways = {row["way"]: row for row in line["rows"]}
    assert {"link", "multiprocessing.Queue", "zeromq pickle", "pipe, one byte"} <= set(ways)
    assert ways["link"]["round trip us"] > 0
    assert ways["link"]["records/s"] > 0
    assert ways["multiprocessing.Queue"]["x link"] > 0


def test_a_table_aligns_numbers_and_leaves_gaps() -> None:
    lines = table([{"a": "x", "n": 1234.5}, {"a": "longer", "n": 0.123456, "extra": "yes"}]).splitlines()
    assert lines == [
        "a            n  extra",
        "------  ------  -----",
        "x        1,234",
        "longer  0.1235  yes",
    ]
