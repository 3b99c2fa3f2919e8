"""Pictures of a run, and of two runs side by side, as PNG files. Loads matplotlib only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.agentx.errors import ReplayError
from bench.agentx.record import Record, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES: Final = (9.0, 5.0)
DOTS_PER_INCH: Final = 120
# Requests over which the cached share is averaged as time goes on.
WINDOW: Final = 25
MAX_TICKS: Final = 32
COLORS: Final = "viridis"


def draw(records: Sequence[Record], folder: Path, title: str) -> list[Path]:
    """The three pictures of one run, into `folder` (made if needed). Raises ReplayError without matplotlib."""
    done = sorted(counted(records), key=lambda record: record.start + (record.end or 0))
    parts: tuple[tuple[str, Callable[[Axes], None]], ...] = (
        ("ttft_by_prompt", lambda axes: first_tokens(axes, done)),
        ("lanes", lambda axes: lanes(axes, records)),
        ("cached_share", lambda axes: cached_share(axes, done)),
    )
    files = []
    for name, paint in parts:
        figure = _figure()
        axes = figure.add_subplot()
        paint(axes)
        axes.set_title(title)
        files.append(_written(figure, folder / f"{name}.png"))
    return files


def draw_two(runs: Sequence[tuple[str, Sequence[Record]]], folder: Path, titles: Sequence[str]) -> Path:
    """Two runs in one picture: how long things took, how much was cached, how fast it went; a title for each part."""
    figure = _figure(height=2)
    grid = figure.subplots(2, 2).flat
    for name, records in runs:
        done = sorted(counted(records), key=lambda record: record.start + (record.end or 0))
        distribution(grid[0], [record.ttft for record in done], name, "time to first token, s")
        distribution(grid[1], [record.inter_token for record in done], name, "inter-token time, s")
        cached_share(grid[2], done, name, ceiling=False)
        finished(grid[3], done, name)
    for axes, title in zip(grid, titles, strict=True):
        axes.set_title(title)
        axes.legend()
    return _written(figure, folder / "compare.png")


def first_tokens(axes: Axes, done: Sequence[Record]) -> None:
    """Time to first token by prompt length, coloured by the share that was cached."""
    known = [record for record in done if record.ttft is not None]
    lengths = [record.prompt_tokens for record in known]
    shares = [record.cached_tokens / max(record.prompt_tokens, 1) for record in known]
    dots = axes.scatter(
        lengths, [record.ttft or 0 for record in known], c=shares, cmap=COLORS, vmin=0, vmax=1, s=16, alpha=0.8
    )
    axes.figure.colorbar(dots, ax=axes, label="cached share of the prompt")
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("time to first token, s")
    axes.set_ylim(bottom=0)


def lanes(axes: Axes, records: Sequence[Record]) -> None:
    """When each lane waited for a first token and when it received; failures in red."""
    numbers = sorted({record.lane for record in records})
    for lane in numbers:
        bars, colors = [], []
        for record in (record for record in records if record.lane == lane):
            end = record.end or 0.0
            first = min(record.ttft if record.ttft is not None else end, end)
            bars += [(record.start, first), (record.start + first, end - first)]
            faint = 0.3 if record.warmup else 0.8
            colors += [("tab:orange", faint), ("tab:red" if record.error else "tab:blue", faint)]
        axes.broken_barh(bars, (lane - 0.35, 0.7), facecolors=colors)
    axes.set_xlabel("s (orange: until the first token, blue: receiving, red: failed or cut off, pale: warm-up)")
    axes.set_ylabel("lane")
    axes.set_ylim(-0.5, max([0, *numbers]) + 0.5)
    axes.set_yticks(numbers[:: 1 + len(numbers) // MAX_TICKS])


def cached_share(axes: Axes, done: Sequence[Record], name: str = "cached", *, ceiling: bool = True) -> None:
    """The share of prompt tokens from cache as requests ended, over the last WINDOW of them."""
    times = [record.start + (record.end or 0) for record in done]
    prompts = [record.prompt_tokens for record in done]
    axes.plot(times, _rolling([record.cached_tokens for record in done], prompts), label=name)
    if ceiling:
        pages = _rolling([record.shared_pages for record in done], [record.sent_tokens for record in done])
        axes.plot(times, pages, linestyle="--", color="gray", label="ceiling by pages sent")
        axes.legend()
    axes.set_xlabel("s")
    axes.set_ylabel(f"cached share, last {WINDOW} requests")
    axes.set_ylim(0, 1.02)


def distribution(axes: Axes, values: Sequence[float | None], name: str, label: str) -> None:
    """Which share of the requests stayed below a value."""
    known = np.sort([value for value in values if value is not None])
    axes.plot(known, np.arange(1, len(known) + 1) / max(len(known), 1), label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")


def finished(axes: Axes, done: Sequence[Record], name: str) -> None:
    """How many requests were complete as time went on."""
    axes.plot([record.start + (record.end or 0) for record in done], range(1, len(done) + 1), label=name)
    axes.set_xlabel("s")
    axes.set_ylabel("requests done")


def _rolling(parts: Sequence[int], wholes: Sequence[int]) -> list[float]:
    spans = [slice(max(0, at + 1 - WINDOW), at + 1) for at in range(len(parts))]
    return [sum(parts[span]) / max(sum(wholes[span]), 1) for span in spans]


def _figure(height: int = 1) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplayError(f"--plots needs matplotlib, of the extra `bench`: {error}") from error
    return Figure(figsize=(SIZE_INCHES[0] * (1 + height) / 2, SIZE_INCHES[1] * height), layout="constrained")


def _written(figure: Figure, file: Path) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ReplayError(f"--plots {file.parent}: cannot be written: {error}") from error
    return file
