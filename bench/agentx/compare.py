"""Two saved runs side by side: each figure of both, and how many times the first the second is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.agentx.plots import draw_two
from bench.agentx.record import RunFile
from bench.agentx.results import SPREADS, VALUES

# What has to be equal, or figures compare different work.
SAME_WORK = ("traces", "seed", "lanes", "speedup", "ignore_delays", "idle_cap", "scale", "max_context")


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
    ratios = {str(line["figure"]): line["B/A"] for line in comparison(*runs)}
    titles = [
        _title("time to first token", ratios, "p50", "p90", of="time to first token, s"),
        _title("inter-token time", ratios, "p50", "p90", of="inter-token time, ms"),
        _title("cached share, %", ratios),
        _title("requests per hour", ratios),
    ]
    return draw_two([(name, run.records) for name, run in zip(names, runs, strict=True)], folder, titles)


def _title(label: str, ratios: dict[str, object], *quantiles: str, of: str = "") -> str:
    """The label and how many times A's figure B's is."""
    known = [(name, ratios.get(f"{of or label} {name}".strip())) for name in quantiles or ("",)]
    words = ", ".join(f"{name} {ratio:.3g}".strip() for name, ratio in known if isinstance(ratio, float))
    return f"{label}: B/A {words}" if words else label


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, float | None, float | None]]:
    for name, label, factor in SPREADS:
        for key in one[name]:
            yield f"{label} {key}", _times(one[name][key], factor), _times(other[name].get(key), factor)
    for name, label, factor in VALUES:
        yield label, _times(one[name], factor), _times(other[name], factor)
    yield "errors", sum(one["errors"].values()), sum(other["errors"].values())


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
