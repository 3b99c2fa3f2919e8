"""The bytes both processes agree on, and that native module, stub and Python twin say the same."""

from __future__ import annotations

import ast
from types import ModuleType

import numpy as np
import pytest

from ipc import _ring as ring_native
from ipc import ring_py
from ipc.layout import TOKEN_BYTES, TOKEN_DTYPE
from ipc.link_memory import LinkShape
from tests.ipc_twins import ROOT, TWINS, shared_memory

CONSTANTS = ["LAYOUT_VERSION", "TOKEN_BYTES", "HEADER_BYTES", "LINE_BYTES", "BELL_BYTES", "PULSE_BYTES"]


def stub() -> dict[str, set[str]]:
    """Names in ipc/_ring.pyi, each with the methods of the class it is."""
    names: dict[str, set[str]] = {}
    for node in ast.parse((ROOT / "ipc" / "_ring.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__init__"}
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = set()
    return names


def test_a_token_record_has_32_bytes_without_holes() -> None:
    assert TOKEN_DTYPE.itemsize == TOKEN_BYTES == ring_native.TOKEN_BYTES
    assert TOKEN_DTYPE.fields is not None
    assert sum(field[0].itemsize for field in TOKEN_DTYPE.fields.values()) == TOKEN_BYTES
    for name, (dtype, offset, *_) in TOKEN_DTYPE.fields.items():
        assert offset % dtype.itemsize == 0, name
        assert dtype.byteorder in "=<|", name


@pytest.mark.parametrize("rings", TWINS.values(), ids=TWINS.keys())
def test_both_twins_have_the_names_of_the_stub(rings: ModuleType) -> None:
    for name, methods in stub().items():
        found = {item for item in dir(getattr(rings, name)) if not item.startswith("_")}
        if methods:
            assert methods <= found <= methods | {"check_open"}, name
    assert {name for name in vars(ring_native) if not name.startswith("_")} == set(stub())
    assert set(ring_py.__all__) == set(stub())


def test_both_twins_have_the_same_sizes() -> None:
    for name in [*CONSTANTS, "MESSAGE_OVERHEAD"]:
        assert getattr(ring_native, name) == getattr(ring_py, name), name


@pytest.mark.parametrize(("kind", "capacity"), [("token", 8), ("message", 256)])
def test_both_twins_format_the_same_bytes(kind: str, capacity: int) -> None:
    formatted = []
    for rings in TWINS.values():
        with shared_memory(384 + 256) as memory:
            memory[:384] = b"\xff" * 384
            getattr(rings, f"format_{kind}_ring")(memory, capacity)
            # Bytes 24 to 127 and those behind each cursor are nobody's.
            formatted.append([bytes(memory[at : at + size]) for at, size in ((0, 24), (128, 8), (256, 8))])
    assert formatted[0] == formatted[1]
    assert formatted[0][0][:4] == b"DIRG"


def test_a_links_parts_do_not_overlap() -> None:
    for shape in (LinkShape(), LinkShape(256, 512, 8)):
        assert shape.event_at >= shape.submit_at + 384 + shape.submit_bytes
        assert shape.token_at >= shape.event_at + 384 + shape.event_bytes
        assert shape.size >= shape.token_at + 384 + shape.token_records * TOKEN_BYTES
        assert {at % 4096 for at in (shape.submit_at, shape.event_at, shape.token_at, shape.size)} == {0}


def test_the_token_ring_takes_numpy_columns() -> None:
    records = np.zeros(3, TOKEN_DTYPE)
    records["slot"], records["logprob"], records["time_ns"] = 2**32 - 1, -0.5, 2**64 - 1
    with shared_memory(384 + 256) as memory:
        ring_native.format_token_ring(memory, 8)
        writer, reader = ring_native.TokenWriter(memory), ring_native.TokenReader(memory)
        assert writer.push(records) == 3
        popped = reader.pop(3)
        writer.close()
        reader.close()
    assert popped.tobytes() == records.tobytes()
    assert popped.flags.writeable
