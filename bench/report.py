"""What all benches share: a table for people, then one JSON line last for programs.

A bench that is run by its path (`python bench/ring.py`) has bench/ instead of the root at the front of its import
path, where bench/engine.py would hide the package engine. So each bench begins with

    if not __package__:
        __import__("report")

which finds this file from there, and importing it puts the root first.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0]).resolve() == _HERE:
    # bench/ stays at the end: a child started by multiprocessing runs the script's first lines again.
    sys.path[:] = [str(_HERE.parent), *sys.path[1:], str(_HERE)]

Row = Mapping[str, object]


def machine() -> dict[str, object]:
    """What the figures depend on: processor, usable cores, operating system and Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def report(name: str, rows: Sequence[Row], **facts: object) -> None:
    """Print `rows` as a table and, last, as one JSON line with name, date, machine and further facts."""
    print(table(rows))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {"name": name, "date": date, "machine": machine(), **facts, "rows": rows}
    print(msgspec.json.encode(line).decode())


def table(rows: Sequence[Row]) -> str:
    """Columns in the order of their first appearance; numbers to the right with four digits that count."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    numeric = [all(isinstance(row.get(name, 0), int | float) for row in rows) for name in names]
    lines = []
    for line in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return models[0] if models else platform.machine()
