"""Figures from records made by hand, ceilings of a cache that never forgets, comparisons, pictures, progress."""

from __future__ import annotations

import asyncio
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agentx import compare, plots, results
from bench.agentx.ceiling import PAGE, BlockCeiling, PageCeiling
from bench.agentx.errors import ReplayError
from bench.agentx.progress import Progress, State
from bench.agentx.record import CUT, Record, RunFile, save, saved
from bench.report import table

PNG = b"\x89PNG"


def record(start: float = 0.0, **fields: Any) -> Record:
    """A request of 1,000 prompt tokens and 11 others, one second long."""
    values: dict[str, Any] = {
        "session": "x", "replay": 0, "conversation": "main", "number": 0, "step": 0, "lane": 0, "warmup": False,
        "trace_in": 990, "trace_out": 11, "ttft": 0.5, "last": 0.9, "end": 1.0, "prompt_tokens": 1000,
        "completion_tokens": 11, "sent_tokens": 1000,
    }  # fmt: skip
    return Record(start=start, **(values | fields))


def run_file(records: list[Record], **settings: Any) -> RunFile:
    return RunFile(
        date="2026-01-01", machine={}, settings=settings, summary=results.summary(records, 1), records=records
    )


def test_figures_are_what_they_say() -> None:
    found = results.summary([record(at, ttft=0.1 * (at + 1)) for at in range(10)], ranks=2)
    assert found["requests"] == 10
    assert found["window_s"] == 10.0
    assert found["requests_per_hour"] == pytest.approx(3600)
    assert found["ttft_s"]["p50"] == pytest.approx(0.55)
    assert found["end_to_end_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "mean": 1.0}
    assert found["tokens_per_second_per_rank"] == pytest.approx(10 * 1011 / 10 / 2)
    assert found["output_per_second_per_rank"] == pytest.approx(11 / 2)
    assert found["drift_in"] == {"min": 10, "mean": 10.0, "max": 10}
    assert found["drift_sent"] == {"min": 0, "mean": 0.0, "max": 0}


def test_the_time_between_tokens_is_over_the_tokens_after_the_first() -> None:
    found = results.summary([record(), record(completion_tokens=1)], ranks=1)
    assert found["inter_token_s"]["p50"] == pytest.approx(0.04)
    assert found["interactivity"]["p90"] == pytest.approx(25)


def test_warm_up_failures_and_what_was_cut_off_are_told_apart() -> None:
    records = [
        record(0, warmup=True, cached_tokens=1000), record(5), record(6, error="http 503", ttft=None),
        record(7, error="http 503"), record(8, error="timeout", warmup=True), record(9, error=CUT),
    ]  # fmt: skip
    found = results.summary(records, ranks=1)
    assert (found["requests"], found["warm-up"], found["cut off"]) == (1, 1, 1)
    assert found["errors"] == {"http 503": 2, "timeout": 1}
    assert found["window_s"] == 1.0
    assert found["cached_share"] == 0
    shown = table(results.rows(found))
    assert "http 503" in shown


def test_a_cached_share_is_of_tokens_and_stands_beside_its_ceilings() -> None:
    records = [
        record(cached_tokens=0, shared_pages=0, shared_blocks=0),
        record(
            1, prompt_tokens=3000, sent_tokens=3000, cached_tokens=2000, shared_pages=2560, shared_blocks=2970,
            trace_in=2990,
        ),
    ]  # fmt: skip
    found = results.summary(records, ranks=1)
    assert found["cached_share"] == pytest.approx(0.5)
    assert found["ceiling_pages"] == pytest.approx(0.64)
    assert found["ceiling_blocks"] == pytest.approx(2970 / 3980)
    assert found["cached_of_ceiling"] == pytest.approx(2000 / 2560)


def test_a_run_without_a_request_has_no_figures_but_a_table() -> None:
    found = results.summary([record(error="timeout")], ranks=1)
    assert found["requests_per_hour"] is None
    assert found["ttft_s"]["p50"] is None
    assert "timeout" in table(results.rows(found))
    assert results.drift_lines(found) == []


def test_blocks_that_were_sent_before_are_the_ceiling_of_the_traces() -> None:
    ceiling = BlockCeiling(64)
    assert ceiling.shared([1, 2, 3], 200) == 0
    assert ceiling.shared([1, 2, 4], 192) == 128
    assert ceiling.shared([9, 2, 4], 192) == 0  # an id counts only with all before it
    assert ceiling.shared([1, 2, 3], 150) == 150


prompts = st.lists(
    st.lists(st.sampled_from([(page, copy) for page in range(3) for copy in range(2)]), max_size=4), max_size=8
)


@given(prompts, st.integers(1, PAGE - 1))
def test_pages_that_were_sent_before_are_the_ceiling_of_a_server(drawn: list[list[tuple[int, int]]], rest: int) -> None:
    """Against a model that remembers every prefix of whole pages."""
    ceiling, known = PageCeiling(), set[bytes]()
    for pages in drawn:
        whole = [np.full(PAGE, 10 * page + copy, np.int32) for page, copy in pages]
        ids = np.concatenate([*whole, np.zeros(rest, np.int32)])
        prefixes = [ids[: PAGE * (at + 1)].tobytes() for at in range(len(pages))]
        expected = next((at for at, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
        known.update(prefixes)
        assert ceiling.shared(ids) == expected * PAGE


def test_one_token_of_a_prompt_is_always_computed() -> None:
    ceiling = PageCeiling()
    ids = np.arange(2 * PAGE, dtype=np.int32)
    assert [ceiling.shared(ids) for _ in range(2)] == [0, PAGE]
    assert ceiling.shared(np.arange(2 * PAGE + 1, dtype=np.int32)) == 2 * PAGE
    assert ceiling.shared(np.arange(3, dtype=np.int32)) == 0


def test_two_runs_stand_side_by_side_with_their_ratio() -> None:
    one = run_file([record(at) for at in range(4)], seed=1, lanes=1)
    other = run_file([record(at / 2, ttft=0.25, cached_tokens=500) for at in range(4)], seed=1, lanes=2)
    lines = {line["figure"]: line for line in compare.comparison(one, other)}
    assert lines["time to first token, s p50"] == {
        "figure": "time to first token, s p50", "A": 0.5, "B": 0.25, "B/A": 0.5,
    }  # fmt: skip
    assert lines["requests per hour"]["B/A"] == pytest.approx(4 / 2.5)
    assert lines["cached share, %"] == {"figure": "cached share, %", "A": 0.0, "B": 50.0, "B/A": ""}
    assert compare.differences(one, other) == ["lanes: A has 1, B has 2"]


def test_a_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    run = run_file([record(), record(error=CUT, ttft=None, end=None)])
    save(tmp_path / "run.json", run)
    assert saved(tmp_path / "run.json") == run
    (tmp_path / "old.json").write_bytes((tmp_path / "run.json").read_bytes().replace(b'"format":1', b'"format":0'))
    (tmp_path / "bad.json").write_text("{}")
    for name, why in (("old", "form 0, where 1 is read"), ("bad", "no report of a replay"), ("gone", "no report")):
        with pytest.raises(ReplayError, match=rf"{name}\.json: {why}"):
            saved(tmp_path / f"{name}.json")
    with pytest.raises(ReplayError, match="cannot be written"):
        save(tmp_path / "nowhere" / "run.json", run)


def test_pictures_are_drawn_of_one_run_and_of_two(tmp_path: Path) -> None:
    records = [record(at, lane=at % 2, cached_tokens=100 * at, warmup=at == 0) for at in range(6)]
    records += [record(6, error=CUT, ttft=None, end=None), record(7, error="timeout", ttft=None)]
    files = plots.draw(records, tmp_path / "new", "title")
    assert [file.name for file in files] == ["ttft_by_prompt.png", "lanes.png", "cached_share.png"]
    run = run_file(records)
    files.append(compare.draw((Path("a.json"), Path("b.json")), (run, run), tmp_path))
    assert all(file.read_bytes().startswith(PNG) for file in files)


def test_runs_without_a_request_can_be_drawn_and_compared(tmp_path: Path) -> None:
    assert len(plots.draw([], tmp_path, "empty")) == 3
    empty, some = run_file([]), run_file([record()])
    for runs in ((empty, some), (empty, empty)):
        assert compare.draw((Path("a.json"), Path("b.json")), runs, tmp_path).exists()
        assert table(compare.comparison(*runs))


def test_pictures_need_matplotlib_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReplayError, match="--plots needs matplotlib, of the extra `bench`"):
        plots.draw([], tmp_path, "none")


def test_progress_tells_how_far_a_replay_is() -> None:
    now = [0.0]
    state = State(total=8, limit_s=math.inf)
    progress = Progress(state, io.StringIO(), lambda: now[0])
    state.done, state.failed, state.running, state.prompt_tokens, state.cached_tokens = 1, 1, 3, 200, 50
    now[0] = 12.0
    assert progress.line() == "[######..................] 12 s  1/8 done  3 running  1 failed  25.0 % cached"
    state.total, state.limit_s = 0, 24.0
    assert progress.line().startswith("[############............] 12 s  1 done")
    state.limit_s = 6.0
    assert progress.line().startswith(f"[{'#' * 24}]")


class Screen(io.StringIO):
    """A terminal or not; `enough` is set once some lines were written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.enough = asyncio.Event()

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        if self.getvalue().count("done") > 3:
            self.enough.set()


@pytest.mark.parametrize(("terminal", "begins", "ends"), [(True, "\r\x1b[K[", "\r\x1b[K"), (False, "[", "cached\n")])
async def test_progress_writes_over_its_line_on_a_terminal_only(
    terminal: bool, begins: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERMINAL_S", "PLAIN_S"):
        monkeypatch.setattr(f"bench.agentx.progress.{name}", 0.001)
    screen = Screen(terminal=terminal)
    task = asyncio.create_task(Progress(State(), screen).run())
    await screen.enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert screen.getvalue().startswith(begins)
    assert screen.getvalue().endswith(ends)
