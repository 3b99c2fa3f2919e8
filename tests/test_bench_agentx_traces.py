"""Traces: what is read is what was written, and what is wrong is named with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agentx.errors import TraceError
from bench.agentx.location import line_of, path_of
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import StreamedTurn, Subagent, Turn, read, write

TURN: dict[str, Any] = {"type": "n", "t": 0, "model": "m", "in": 130, "out": 5, "hash_ids": [1, 2]}
AGENT: dict[str, Any] = {"type": "subagent", "t": 3, "agent_id": "a", "requests": [{**TURN, "type": "s", "ttft": 0.1}]}
TRACE: dict[str, Any] = {
    "id": "one",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "requests": [TURN, AGENT, {**TURN, "t": 9.5, "hash_ids": [1, 2, 3]}],
    "totals": {"whatever": 1},
}


def _with(path: str, value: object) -> dict[str, Any]:
    """TRACE with another value at a path; `...` takes the field away."""
    changed = json.loads(json.dumps(TRACE))
    *steps, last = path_of(f"${path}")
    place = changed
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return dict(changed)


def test_a_trace_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(TRACE | {"id": "two"}, indent=1))
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(TRACE) + "\n\n" + json.dumps(TRACE | {"id": "three"}) + "\n")
    (tmp_path / "notes.txt").write_text("no trace")
    assert [trace.id for trace in read(tmp_path)] == ["one", "three", "two"]
    trace = read(tmp_path / "b.json")[0]
    first, agent, last = trace.requests
    assert isinstance(first, Turn)
    assert isinstance(last, Turn)
    assert (first.tokens_in, first.tokens_out, first.hash_ids, last.t) == (130, 5, [1, 2], 9.5)
    assert isinstance(agent, Subagent)
    (inner,) = agent.requests
    assert isinstance(inner, StreamedTurn)
    assert inner.ttft == 0.1


@pytest.mark.parametrize(
    ("path", "value", "field", "reason"),
    [
        (".requests[0].in", "many", "requests[0].in", "Expected `int`, got `str`"),
        (".requests[2].out", -1, "requests[2].out", ">= 0"),
        (".requests[0].hash_ids[1]", 1.5, "requests[0].hash_ids[1]", "Expected `int`"),
        (".requests[0].hash_ids", [1, 2, 3, 4], "requests[0].hash_ids", "4 blocks of 64 tokens, where `in` is 130"),
        (".requests[0].hash_ids", [], "requests[0].hash_ids", "0 blocks are shorter than the 64 tokens"),
        (".requests[0].in", 0, "requests[0].in", "a prompt has tokens"),
        (".requests[1].requests[0].t", "soon", "requests[1].requests[0].t", "Expected `float`"),
        (".requests[1].requests[0].extra", 1, "requests[1].requests[0]", "unknown field `extra`"),
        (".requests[0].type", "x", "requests[0].type", "Invalid value 'x'"),
        (".requests[0].t", ..., "requests[0]", "missing required field `t`"),
        (".requests", [AGENT], "requests", "no request"),
        (".hash_id_scope", "global", "hash_id_scope", "Invalid enum value 'global'"),
        (".block_size", 1, "block_size", ">= 2"),
        (".id", "", "id", "length >= 1"),
        (".id", ..., "", "missing required field `id`"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, field: str, reason: str, tmp_path: Path) -> None:
    text = json.dumps(_with(path, value), indent=1)
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(file)
    error = caught.value
    assert (error.file, error.field) == (file, field)
    assert reason in str(error)
    assert str(error).startswith(f"{file}:{error.line}: ")
    # The line is that of the field, or of the object that lacks it.
    name = path_of(f"$.{field}")[-1] if field else None
    line = text.splitlines()[error.line - 1]
    assert f'"{name}":' in line or (not isinstance(name, str) and line.strip() in {"{", "1.5"})


def test_the_line_in_a_file_of_lines_is_counted_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join([json.dumps(TRACE), "", json.dumps(_with(".requests[0].in", None) | {"id": "two"})]))
    with pytest.raises(TraceError, match=r"bad\.jsonl:3: requests\[0\]\.in: Expected `int`, got `null`"):
        read(file)
    file.write_text(json.dumps(TRACE) + '\n{"id": \n')
    with pytest.raises(TraceError, match=r"bad\.jsonl:2: no valid JSON"):
        read(file)


def test_a_file_that_stops_in_the_middle_is_named_where_it_stops(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{\n "id": "one",\n "models": [,\n')
    with pytest.raises(TraceError, match=r"bad\.json:3: no valid JSON"):
        read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read"):
        read(file)


def test_an_id_is_used_once_and_something_is_there(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(TRACE))
    with pytest.raises(TraceError, match=rf"b\.json:1: id: 'one' is also the id of {tmp_path}/a\.json:1"):
        read(tmp_path)
    for missing in (tmp_path / "nowhere", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(TraceError, match="no traces here"):
            read(missing)


def test_written_traces_are_read_back(tmp_path: Path) -> None:
    traces = generate(Options(conversations=3, turns=9))
    write(traces, tmp_path / "new")
    assert read(tmp_path / "new") == traces


@settings(max_examples=40)
@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
    data=st.data(),
)
def test_a_line_is_found_for_every_value(value: Any, data: st.DataObject) -> None:
    """Marked in the value itself, so that the printed line shows it."""
    path: list[str | int] = []
    holder: Any = [value]
    key: Any = 0
    while isinstance(holder[key], list | dict) and holder[key]:
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        path.append(key)
    mark = "here \x01"
    if path:
        holder[key] = mark
        text = json.dumps(value, indent=data.draw(st.sampled_from([None, 0, 2])))
        shown = [json.dumps(mark) in line for line in text.split("\n")]
        assert line_of(text, path) == shown.index(True) + 1
