"""The flags of a replay, their defaults and their checks. Knows nothing about what they do."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from bench.agentx.errors import OptionError
from bench.agentx.fitting import MIN_BLOCK
from bench.agentx.synthetic import Options

# Not in reports: a secret, and what says nothing about the figures.
PRIVATE: Final = ("api_key", "json", "plots")


@dataclass(frozen=True)  # no slots: the parser reads the defaults from the class
class Settings:
    """Of one replay. Raises OptionError naming the flag."""

    traces: Path | None = None
    synthetic: str = ""
    sessions: int = 0
    url: str = ""
    server_flags: str = ""
    model: str = ""
    api_key: str = ""
    tokenizer: Path | None = None
    lanes: int = 1
    warmup: int = 0
    duration: float = math.inf
    max_requests: int = 0
    passes: int = 1
    speedup: float = 1.0
    ignore_delays: bool = False
    idle_cap: float = 10.0
    scale: float = 1.0
    max_context: int = 0
    seed: int = 0
    bypass_cache: bool = False
    ignore_eos: bool = True
    timeout: float = 3600.0
    ranks: int = 0  # as many as the server tells
    json: Path | None = None
    plots: Path | None = None

    def __post_init__(self) -> None:
        if self.traces is not None and self.synthetic:
            raise OptionError(f"--synthetic {self.synthetic}: traces are already read from {self.traces}")
        for name in ("lanes", "speedup", "timeout", "duration"):
            if not getattr(self, name) > 0:
                raise OptionError(f"--{name} {getattr(self, name)}: must be above 0")
        for name in ("sessions", "warmup", "max_requests", "passes", "idle_cap", "max_context", "ranks"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if not 0 < self.scale <= 1:
            raise OptionError(f"--scale {self.scale}: must be above 0 and at most 1")
        if not self.passes and math.isinf(self.duration) and not self.max_requests:
            raise OptionError("--passes 0: without end; give --duration or --max-requests")

    def public(self) -> dict[str, Any]:
        """As a report has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in PRIVATE}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return {name: None if value == math.inf else value for name, value in plain.items()}


@dataclass(frozen=True, slots=True)
class Other:
    """What the bench does instead of a replay."""

    compare: tuple[Path, Path] | None
    write_traces: Path | None


def parse(argv: Sequence[str] | None) -> tuple[Settings, Other]:
    """Raises OptionError; argparse itself ends the program for flags it does not know."""
    found = vars(_parser().parse_args(argv))
    compare, write_traces = found.pop("compare"), found.pop("write_traces")
    if found["seed"] is None:
        found["seed"] = secrets.randbits(32)
    if found["passes"] is None:
        found["passes"] = 1 if math.isinf(found["duration"]) and not found["max_requests"] else 0
    return Settings(**found), Other(tuple(compare) if compare else None, write_traces)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python bench/replay_agentx.py",
        description="Replay traces of agent sessions against an OpenAI-compatible server.",
    )
    _add_work(parser)
    _add_target(parser)
    _add_pace(parser)
    add = parser.add_argument_group("what comes out").add_argument
    add(
        "--ranks",
        type=int,
        default=Settings.ranks,
        metavar="N",
        help="tokens a second are divided by it (default: as the server's /health tells, else 1)",
    )
    add("--json", type=Path, metavar="FILE", help="figures, settings and one record a request")
    add("--plots", type=Path, metavar="FOLDER", help="pictures as PNG")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two files of --json side by side; replays nothing")
    add(
        "--write-traces",
        type=Path,
        metavar="FOLDER",
        help="write the traces as they would be replayed; replays nothing",
    )
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is replayed").add_argument
    add("traces", type=Path, nargs="?", help="Weka traces: a .json or .jsonl file, or a folder of them")
    add("--synthetic", default="", metavar="NAME=VALUE,...", help=f"made traces instead; default: {Options().text}")
    add("--sessions", type=int, default=Settings.sessions, metavar="N", help="read only so many traces; 0: all")
    add(
        "--scale",
        type=float,
        default=Settings.scale,
        help=f"shorten blocks (to {MIN_BLOCK} tokens at least) and answers",
    )
    add("--max-context", type=int, default=Settings.max_context, metavar="TOKENS",
        help="cut conversations where they get longer; 0: what the server lists as max_model_len")  # fmt: skip
    add(
        "--seed",
        type=int,
        metavar="N",
        help="of the cache-bust markers; the same one repeats prompts; default: a new one",
    )
    add("--bypass-cache", action="store_true", help='send the non-standard "prefix_cache": false')
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the server end answers early")


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("against what").add_argument
    add("--url", default="", help="of the server; default: the demo model by a server started for this replay")
    add("--server-flags", default="", metavar="FLAGS", help="of the server that is started without --url")
    add("--model", default="", help="default: the first one the server lists")
    add("--api-key", default="", help="sent as bearer token")
    add("--tokenizer", type=Path, metavar="FOLDER", help="the served model's folder; default: the demo model's")
    add("--timeout", type=float, default=Settings.timeout, metavar="S", help="for one request")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how").add_argument
    add("--lanes", type=int, default=Settings.lanes, metavar="N", help="sessions at once")
    add("--warmup", type=int, default=Settings.warmup, metavar="N", help="requests of each lane before anything counts")
    add(
        "--duration", type=float, default=Settings.duration, metavar="S", help="end after so long, not counting warm-up"
    )
    add(
        "--max-requests",
        type=int,
        default=Settings.max_requests,
        metavar="N",
        help="end after so many, without warm-up",
    )
    add("--passes", type=int, metavar="N",
        help="replays of each session; 0: until another bound; default: 1, with another bound 0")  # fmt: skip
    add("--speedup", type=float, default=Settings.speedup, metavar="X", help="divide think times by it")
    add("--ignore-delays", action="store_true", help="no think times at all")
    add("--idle-cap", type=float, default=Settings.idle_cap, metavar="S", help="longest recorded think time; inf: any")
