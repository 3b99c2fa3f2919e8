"""Walks through columns, native and in Python: equal answers on random tables and forests, and no step outside."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache import _walks as walks_native
from hicache import walks_py

TWINS: dict[str, ModuleType] = {"native": walks_native, "python": walks_py}
twins = pytest.mark.parametrize("walks", TWINS.values(), ids=TWINS.keys())
SLOTS = 12
READY = 2
ROW_BYTES = 512

Column = npt.NDArray[np.int32]


def column(*numbers: int) -> Column:
    return np.array(numbers, np.int32)


def slots(blob: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(blob, np.int32).tolist()
    return numbers


class Table:
    """A table of few buckets over keys of which some are equal."""

    def __init__(self, walks: ModuleType) -> None:
        self.walks = walks
        self.heads, self.after = np.full(4, -1, np.int32), np.full(SLOTS, -1, np.int32)
        self.keys = np.array([(slot % 5, slot % 7) for slot in range(SLOTS)], np.uint64)

    def find(self) -> list[int]:
        return slots(self.walks.find(self.heads, self.after, self.keys, self.keys))

    def change(self, name: str, numbers: list[int]) -> None:
        getattr(self.walks, name)(self.heads, self.after, self.keys, column(*numbers))


@given(st.lists(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=6), max_size=12))
@settings(deadline=None)
def test_tables_are_the_same_after_any_changes(steps: list[list[int]]) -> None:
    """Each step puts in what is out and takes out what is in."""
    tables = [Table(walks) for walks in TWINS.values()]
    inside: list[int] = []
    for numbers in steps:
        for name, chosen in (
            ("link", [number for number in numbers if number not in inside]),
            ("unlink", [number for number in numbers if number in inside]),
        ):
            for table in tables:
                table.change(name, chosen)
            inside = inside + chosen if name == "link" else [number for number in inside if number not in chosen]
        wanted = [
            max((inside.index(slot), slot) for slot in inside if (tables[0].keys[slot] == key).all())[1]
            if any((tables[0].keys[slot] == key).all() for slot in inside)
            else -1
            for key in tables[0].keys
        ]
        assert tables[0].find() == tables[1].find() == wanted


@given(st.data())
@settings(deadline=None)
def test_paths_and_climbs_are_the_same_in_any_forest(data: st.DataObject) -> None:
    parents = column(*(data.draw(st.integers(-1, slot - 1)) for slot in range(SLOTS)))
    children = np.array([np.count_nonzero(parents == slot) for slot in range(SLOTS)], np.int32)
    few = st.sampled_from([0, 0, 0, 0, 1])
    pins = column(*(data.draw(few) for _ in range(SLOTS)))
    status = np.array([READY - data.draw(few) for _ in range(SLOTS)], np.uint8)
    line = column(*(data.draw(few) - 1 for _ in range(SLOTS + 1)))
    slot, most = data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(1, SLOTS))
    columns = parents, children, pins, status, line
    path = slots(walks_native.path(parents, slot))
    assert path == slots(walks_py.path(parents, slot))
    assert path[-1] == slot
    assert parents[path].tolist() == [-1, *path[:-1]]
    climbed = slots(walks_native.climb(columns, READY, slot, most))
    assert climbed == slots(walks_py.climb(columns, READY, slot, most))
    assert climbed == path[::-1][: len(climbed)]
    stays = [at for at in path[::-1][1:] if children[at] != 1 or pins[at] or status[at] != READY or line[at] != -1]
    assert len(climbed) == min(most, path[::-1].index(stays[0]) if stays else len(path))


@twins
def test_rows_agree_up_to_the_first_that_differs(walks: ModuleType) -> None:
    tokens = np.arange(SLOTS * 128, dtype=np.int32).reshape(SLOTS, 128)
    order = column(7, 3, 3, 0)
    ids = tokens[order]
    assert walks.agreeing(tokens, order, ids, ROW_BYTES) == 4
    assert walks.agreeing(tokens, order, ids[:2], ROW_BYTES) == 2
    assert walks.agreeing(tokens, order[:0], ids, ROW_BYTES) == 0
    for row in range(4):
        for at in (0, 127):
            other = ids.copy()
            other[row, at] += 1
            assert walks.agreeing(tokens, order, other, ROW_BYTES) == row


@twins
def test_a_path_of_nothing_is_empty(walks: ModuleType) -> None:
    assert walks.path(column(-1), -1) == b""


@twins
def test_what_is_not_in_the_table_cannot_be_taken_out(walks: ModuleType) -> None:
    table = Table(walks)
    table.change("link", [1, 5])
    with pytest.raises(ValueError, match="slot 9 is not in its bucket"):
        table.change("unlink", [9])


# ---- the native ones follow no number out of its column ----


def test_broken_links_are_errors() -> None:
    table = Table(walks_native)
    table.heads[:] = SLOTS
    with pytest.raises(ValueError, match=f"slot {SLOTS} is outside of {SLOTS}"):
        table.find()
    for name in ("link", "unlink"):
        with pytest.raises(ValueError, match="outside"):
            table.change(name, [-1])
    tokens = np.zeros((SLOTS, 128), np.int32)
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match="outside"):
            walks_native.agreeing(tokens, column(slot), tokens, ROW_BYTES)
        with pytest.raises(ValueError, match="outside"):
            walks_native.path(column(slot if slot > 0 else -2, -1), 0)
    ones, status = np.ones(4, np.int32), np.full(4, READY, np.uint8)
    with pytest.raises(ValueError, match="slot 7 is outside of 4"):
        walks_native.climb((column(7, 0, 1, -1), ones, 0 * ones, status, np.full(5, -1, np.int32)), READY, 2, 9)


def test_chains_and_paths_without_an_end_are_errors() -> None:
    table = Table(walks_native)
    table.change("link", [0, 5])
    table.after[0] = 5
    table.keys[7] = (0, 99)
    with pytest.raises(ValueError, match="has no end"):
        table.find()
    with pytest.raises(ValueError, match="not in its bucket"):
        table.change("unlink", [7])
    with pytest.raises(ValueError, match="has no beginning"):
        walks_native.path(column(1, 0), 0)
    ones, status = np.ones(2, np.int32), np.full(2, READY, np.uint8)
    assert len(slots(walks_native.climb((column(1, 0), ones, 0 * ones, status, column(-1, -1, -1)), READY, 0, 99))) == 2


def test_columns_of_other_elements_are_refused() -> None:
    table = Table(walks_native)
    with pytest.raises(ValueError, match="8 bytes an element instead of 4"):
        walks_native.path(np.zeros(3, np.int64), 0)
    with pytest.raises(ValueError, match="3 buckets are no power of two"):
        walks_native.find(table.heads[:3], table.after, table.keys, table.keys)
    with pytest.raises(ValueError, match="read-only"):
        walks_native.link(np.frombuffer(bytes(16), np.int32), table.after, table.keys, column(1))
    with pytest.raises(ValueError, match="rows of 0 bytes"):
        walks_native.agreeing(table.after, column(1), table.after, 0)
    with pytest.raises(ValueError, match="columns are no tuple of 5"):
        walks_native.climb((table.after,), READY, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 2 arguments, got 1"):
        walks_native.path(table.after)  # type: ignore[call-arg]
