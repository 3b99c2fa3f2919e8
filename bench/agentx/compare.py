"""Two saved runs side by side: each figure of both, and how many times the first the second is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.agentx.plots import draw_two
from bench.agentx.record import RunFile
from bench.agentx.results import SPREADS, VALUES

# What has to be equal, or figures compare different work; `digest` stands for the traces.
SAME_WORK: Final = (
    "digest",
    "seed",
    "lanes",
    "warmup",
    "passes",
    "duration",
    "max_requests",
    "speedup",
    "ignore_delays",
    "idle_cap",
    "max_context",
)


def comparison(one: RunFile, other: RunFile) -> list[dict[str, object]]:
    """The lines of the table."""
    return [
        {"figure": label, "A": a, "B": b, "B/A": b / a if a and b is not None else ""}
        for label, a, b in _pairs(one.summary, other.summary)
        if a is not None or b is not None
    ]


def differences(one: RunFile, other: RunFile) -> list[str]:
    """In words, which settings of the work itself are not the same."""
    return [
        f"{name}: A has {one.settings.get(name)}, B has {other.settings.get(name)}"
        for name in SAME_WORK
        if one.settings.get(name) != other.settings.get(name)
    ]


def draw(files: tuple[Path, Path], runs: tuple[RunFile, RunFile], folder: Path) -> Path:
    """Both in one picture, with their ratios."""
    names = [f"{letter}: {file.stem}" for letter, file in zip("AB", files, strict=True)]
    lines = {str(line["figure"]): line for line in comparison(*runs)}
    titles = [
        "time to first token" + _ratios(lines, p50="time to first token, s p50", p90="time to first token, s p90"),
        "inter-token time" + _ratios(lines, p50="inter-token time, ms p50", p90="inter-token time, ms p90"),
        "cached share" + "".join(f", {letter} {_percent(run)}" for letter, run in zip("AB", runs, strict=True)),
        "requests done" + _ratios(lines, rate="requests per hour"),
    ]
    return draw_two([(name, run.records) for name, run in zip(names, runs, strict=True)], folder, titles)


def _ratios(lines: Mapping[str, Mapping[str, object]], **figures: str) -> str:
    """How many times A's figures B's are, where both have them."""
    found = ((name, lines.get(figure, {}).get("B/A")) for name, figure in figures.items())
    return "".join(f", {name} B/A {ratio:.3g}" for name, ratio in found if isinstance(ratio, float))


def _percent(run: RunFile) -> str:
    share = run.summary["cached_share"]
    return "unknown" if share is None else f"{100 * share:.3g} %"


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, float | None, float | None]]:
    for name, label, factor in SPREADS:
        for key in one[name]:
            yield f"{label} {key}", _times(one[name][key], factor), _times(other[name].get(key), factor)
    for name, label, factor in VALUES:
        yield label, _times(one[name], factor), _times(other[name], factor)
    yield "errors", sum(one["errors"].values()), sum(other["errors"].values())


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
