"""One request of a replay as it went, and the report file that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.agentx.errors import ReplayError

# Readers refuse files of another form by it.
FORMAT: Final = 1


class Record(msgspec.Struct, kw_only=True):
    """Times are seconds: `start` since the replay began, `ttft` and `end` since the request was sent.

    `error` is empty, or its kind; then times and counts are as far as the request came. A request that the end of the
    replay cut off has the kind CUT and counts as neither done nor failed.
    """

    session: str
    replay: int
    conversation: str
    number: int  # of the conversation within its session
    step: int
    lane: int
    warmup: bool
    start: float
    trace_in: int
    trace_out: int
    ttft: float | None = None
    last: float | None = None
    end: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    detail: str = ""
    # Filled in after the replay.
    sent_tokens: int = 0
    shared_blocks: int = 0
    shared_pages: int = 0

    @property
    def inter_token(self) -> float | None:
        """Seconds from one token to the next, on average; None for an answer of one token."""
        if self.ttft is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.ttft) / (self.completion_tokens - 1)


CUT: Final = "cut off"


class RunFile(msgspec.Struct, kw_only=True):
    """What `--json` writes and `--compare` reads."""

    format: int = FORMAT
    date: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]
    records: list[Record]


def save(file: Path, run: RunFile) -> None:
    """Raises ReplayError where the file cannot be written."""
    try:
        file.write_bytes(msgspec.json.encode(run) + b"\n")
    except OSError as error:
        raise ReplayError(f"--json {file}: cannot be written: {error}") from error


def saved(file: Path) -> RunFile:
    """Raises ReplayError naming the file and what is wrong with it."""
    try:
        run = msgspec.json.decode(file.read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"{file}: no report of a replay: {error}") from error
    if run.format != FORMAT:
        raise ReplayError(f"{file}: form {run.format}, where {FORMAT} is read")
    return run


def counted(records: Sequence[Record]) -> list[Record]:
    """Those that figures are made of: complete, and after the warm-up."""
    return [record for record in records if not record.warmup and not record.error]
