"""Recorded agent sessions in the Weka format: one JSON object a session, as a file of its own or a line of a JSONL.

Promises that what `read` returns can be replayed: types, ranges and sizes are checked, unknown fields refused, and an
error names file, line and field. Knows nothing about text, servers or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from bench.agentx.errors import TraceError
from bench.agentx.location import line_of, path_of

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Blocks of one token would have too few texts to be told apart; above a million tokens there is no context to block.
BlockSize = Annotated[int, Meta(ge=2, le=2**20)]

_NAMES: Final = {"tokens_in": "in", "tokens_out": "out"}


class Turn(msgspec.Struct, kw_only=True, tag_field="type", tag="n", rename=_NAMES, forbid_unknown_fields=True):
    """One model request. `t` is its start in seconds, `hash_ids` name its blocks, each with its whole prefix."""

    t: Seconds
    model: str = ""
    tokens_in: Count
    tokens_out: Count
    hash_ids: list[int] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str | None = None
    api_time: Seconds | None = None
    think_time: float | None = None

    @property
    def end(self) -> float:
        """When its answer was complete."""
        return self.t + (self.api_time or 0.0)


class StreamedTurn(Turn, kw_only=True, tag="s"):
    """The same, whose answer was streamed."""

    ttft: Seconds | None = None


AnyTurn = Turn | StreamedTurn


class Subagent(msgspec.Struct, kw_only=True, tag_field="type", tag="subagent", forbid_unknown_fields=True):
    """A conversation that a turn started; its turns' `t` count from the session's start."""

    t: Seconds
    agent_id: str | None = None
    subagent_type: str | None = None
    duration_ms: Annotated[float, Meta(ge=0)] | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    status: str | None = None
    models: list[str] = []
    tool_tokens: Count = 0
    system_tokens: Count = 0
    requests: list[AnyTurn]

    @property
    def end(self) -> float:
        """When it had finished."""
        if self.duration_ms is not None:
            return self.t + self.duration_ms / 1000
        return max((turn.end for turn in self.requests), default=self.t)


class Trace(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One session. Hash ids of different traces have nothing to do with each other."""

    id: Annotated[str, Meta(min_length=1)]
    models: list[str] = []
    block_size: BlockSize
    hash_id_scope: Literal["local"]
    tool_tokens: Count = 0
    system_tokens: Count = 0
    requests: list[AnyTurn | Subagent]
    totals: Any = None


def read(source: Path, limit: int = 0) -> list[Trace]:
    """The traces of a `.json` file, a `.jsonl` file, or a folder of both in the order of their names.

    No more than the first `limit`, if it is not 0. Raises TraceError.
    """
    files = [source]
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.suffix in {".json", ".jsonl"})
    if not files or not source.exists():
        raise TraceError(source, 0, "", "no traces here: a .json or .jsonl file, or a folder of them, is expected")
    traces: list[Trace] = []
    places: dict[str, str] = {}
    found = ((file, line, trace) for file in files for line, trace in _traces(file))
    for file, line, trace in islice(found, limit or None):
        if trace.id in places:
            raise TraceError(file, line, "id", f"{trace.id!r} is also the id of {places[trace.id]}")
        places[trace.id] = f"{file}:{line}"
        traces.append(trace)
    return traces


def write(traces: Sequence[Trace], folder: Path) -> None:
    """One file a trace into `folder`, made if needed; `read` gives them back, sorted by id if ids are file names."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        (folder / f"{trace.id}.json").write_bytes(msgspec.json.encode(_plain(trace)) + b"\n")


def _plain(value: Any) -> Any:
    """Without fields that are null or empty: readers differ in what they take for those."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one not in (None, "", [])}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _traces(file: Path) -> Iterator[tuple[int, Trace]]:
    """Each trace and the line it starts in; of a long file no more is read than is asked for."""
    try:
        with file.open(encoding="utf-8") as opened:
            if file.suffix == ".jsonl":
                for number, line in enumerate(opened, 1):
                    if line.strip():
                        yield number, _trace(file, number, line.rstrip("\n"))
            else:
                yield 1, _trace(file, 1, opened.read())
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(file, 1, "", f"cannot be read: {error}") from error


def _trace(file: Path, first_line: int, text: str) -> Trace:
    try:
        trace = msgspec.json.decode(text, type=Trace)
    except msgspec.ValidationError as error:
        reason, _, pointer = str(error).partition(" - at `")
        raise _error(file, first_line, text, pointer.rstrip("`") or "$", reason) from None
    except msgspec.DecodeError as error:
        raise TraceError(file, first_line + _broken_line(text), "", f"no valid JSON: {error}") from None
    for pointer, reason in _faults(trace):
        raise _error(file, first_line, text, pointer, reason)
    return trace


def _error(file: Path, first_line: int, text: str, pointer: str, reason: str) -> TraceError:
    line = first_line + line_of(text, path_of(pointer)) - 1
    return TraceError(file, line, pointer.removeprefix("$").removeprefix("."), reason)


def _broken_line(text: str) -> int:
    """Lines before the place at which the text stops being JSON."""
    import json

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.lineno - 1
    return 0


def _faults(trace: Trace) -> Iterator[tuple[str, str]]:
    """What the types do not say: path and reason."""
    if not any(not isinstance(entry, Subagent) for entry in trace.requests):
        yield "$.requests", "holds no request"
    head = trace.tool_tokens + trace.system_tokens
    for index, entry in enumerate(trace.requests):
        where = f"$.requests[{index}]"
        if isinstance(entry, Subagent):
            inner = entry.tool_tokens + entry.system_tokens
            for number, turn in enumerate(entry.requests):
                yield from _turn_faults(f"{where}.requests[{number}]", turn, trace.block_size, inner)
        else:
            yield from _turn_faults(where, entry, trace.block_size, head)


def _turn_faults(where: str, turn: Turn, block: int, head: int) -> Iterator[tuple[str, str]]:
    if turn.tokens_in == 0:
        yield f"{where}.in", "0, but a prompt has tokens"
    room = -(-turn.tokens_in // block)
    if len(turn.hash_ids) > room:
        yield f"{where}.hash_ids", f"{len(turn.hash_ids)} blocks of {block} tokens, where `in` is {turn.tokens_in}"
    if head and len(turn.hash_ids) < -(-head // block):
        yield f"{where}.hash_ids", f"{len(turn.hash_ids)} blocks are shorter than the {head} tokens of tools and system"
