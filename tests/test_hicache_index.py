"""The index and its parts: the table against a dictionary, the order of use against a list, paths that live and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.buckets import Buckets, Words, key_words
from hicache.index import PageIndex
from hicache.keys import PAGE_TOKENS, extend, root
from hicache.lru import LruList
from hicache.memo import ENTRY_BYTES, Memo
from hicache.pages import NO_PARENT, NO_SLOTS, Ids
from hicache.states import StateSlots
from hicache.traces import EVICTED_KEYS, EvictedKeys, FirstPages
from tests.cache_invariants import check_index, members

MINE, YOURS = root(b"secret", b"me"), root(b"secret", b"you")


def ids_of(letters: str) -> Ids:
    """One page a letter, `[n, 128]`."""
    return np.repeat(np.frombuffer(letters.encode(), np.uint8).astype(np.int32), PAGE_TOKENS).reshape(-1, PAGE_TOKENS)


def keys_of(letters: str, top: bytes = MINE) -> Words:
    return key_words(extend(top, ids_of(letters).reshape(-1)))


def store(index: PageIndex, letters: str, top: bytes = MINE) -> list[int]:
    """Store what a prompt lacks, as a plan does; returns the slots of all its pages."""
    ready = index.match(top, keys_of(letters, top), ids_of(letters)).ready
    index.pin(ready)
    found = len(ready)
    slots = NO_SLOTS
    if found < len(letters):
        behind = int(ready[-1]) if found else NO_PARENT
        made = index.reserve(top, behind, keys_of(letters, top)[found:], ids_of(letters)[found:], owner=1)
        assert made is not None
        index.commit(made, np.arange(len(made), dtype=np.uint64))
        slots = made
    index.unpin(ready)
    check_index(index)
    return [*ready.tolist(), *slots.tolist()]


def cached(index: PageIndex, letters: str, top: bytes = MINE) -> int:
    """Pages that a look finds."""
    return len(index.match(top, keys_of(letters, top), ids_of(letters)).ready)


# ---- the table ----


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 40), unique=True, max_size=12)), max_size=12))
@settings(deadline=None)
def test_the_table_finds_what_a_dictionary_finds(steps: list[tuple[bool, list[int]]]) -> None:
    """Slots of eight buckets among 41 keys: chains grow, and whole chains are inserted and removed at once."""
    table = Buckets(41)
    keys = np.stack([np.arange(41) % 8, np.arange(41)], axis=1).astype(np.uint64)
    inside: dict[int, int] = {}
    for inserts, numbers in steps:
        chosen = np.array([number for number in numbers if (number in inside) != inserts], np.int32)
        if inserts:
            table.insert(chosen, keys[chosen])
            inside.update({int(slot): int(slot) for slot in chosen})
        else:
            table.remove(chosen)
            for slot in chosen.tolist():
                del inside[slot]
        assert table.find(keys).tolist() == [inside.get(number, -1) for number in range(41)]


def test_of_two_slots_with_one_key_the_later_one_is_found() -> None:
    table = Buckets(4)
    key = np.array([[5, 6]], np.uint64)
    for slot in (2, 0, 3):
        table.insert(np.array([slot], np.int32), key)
    assert table.find(key).tolist() == [3]
    table.remove(np.array([3, 2], np.int32))
    assert table.find(key).tolist() == [0]
    table.clear()
    assert table.find(key).tolist() == [-1]


# ---- the order of use ----


@given(st.lists(st.tuples(st.sampled_from(["touch", "push_first", "discard"]), st.integers(0, 5)), max_size=60))
def test_the_order_of_use_is_a_lists(steps: list[tuple[str, int]]) -> None:
    line, plain = LruList(6), list[int]()
    for what, number in steps:
        if what == "push_first" and number in plain:
            continue
        getattr(line, what)(number)
        if number in plain:
            plain.remove(number)
        if what != "discard":
            plain.insert(0 if what == "push_first" else len(plain), number)
        assert members(line) == plain
        assert line.first() == (plain[0] if plain else -1)
    line.clear()
    assert members(line) == []


def test_states_go_in_the_order_of_their_use_unless_pinned() -> None:
    states = StateSlots(3)
    slots = [states.take(page, owner=7) for page in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert states.take(3, owner=7) == -1
    assert states.oldest_idle() == -1  # reserved ones do not go
    for slot in slots:
        states.commit(slot, checksum=slot)
    states.pin(slots[0])
    assert states.oldest_idle() == slots[1]
    states.unpin(slots[0])
    states.drop(slots[1])
    assert (states.oldest_idle(), states.used) == (slots[2], 2)
    states.pin(slots[2])
    states.drop(slots[2])  # read at this moment: its slot must not be given away
    assert (states.used, states.is_free(slots[2])) == (2, False)
    states.unpin(slots[2])
    assert states.is_free(slots[2])


# ---- pages ----


def test_a_prefix_is_found_and_a_page_is_stored_once() -> None:
    index = PageIndex(10)
    slots = store(index, "abc")
    assert store(index, "abd")[:2] == slots[:2]
    assert (cached(index, "abcd"), cached(index, "abd"), cached(index, "ba"), index.used) == (3, 3, 0, 4)
    assert index.match(MINE, keys_of("abc"), ids_of("abc")).ready.tolist() == slots


def test_callers_share_no_page() -> None:
    index = PageIndex(10)
    mine, yours = store(index, "abc", MINE), store(index, "abc", YOURS)
    assert not set(mine) & set(yours)
    assert index.match(YOURS, keys_of("abc", YOURS), ids_of("abc")).ready.tolist() == yours
    # Even if every key of one were a key of the other.
    assert not index.match(YOURS, keys_of("abc", MINE), ids_of("abc")).ready.size


def test_a_collision_of_keys_is_a_miss() -> None:
    index = PageIndex(10)
    slots = store(index, "abc")
    keys = keys_of("abc")
    assert not index.match(MINE, keys, ids_of("xbc")).ready.size
    assert index.match(MINE, keys, ids_of("axc")).ready.tolist() == slots[:1]
    assert index.match(MINE, keys, ids_of("abx")).ready.tolist() == slots[:2]
    # A page with the right tokens behind the wrong one, and the very same page twice.
    assert index.match(MINE, keys[[0, 2]], ids_of("ac")).ready.tolist() == slots[:1]
    assert index.match(MINE, keys[[0, 0]], ids_of("aa")).ready.tolist() == slots[:1]
    assert not index.match(MINE, keys[1:], ids_of("bc")).ready.size


@pytest.mark.parametrize("at", [0, 63, 127])
def test_every_token_of_a_page_counts(at: int) -> None:
    index = PageIndex(4)
    store(index, "ab")
    ids = ids_of("ab")
    ids[1, at] += 1
    assert len(index.match(MINE, keys_of("ab"), ids).ready) == 1


def test_the_leaf_used_least_recently_goes_first() -> None:
    index = PageIndex(6)
    store(index, "abc")
    store(index, "xyz")
    store(index, "abc")  # used again
    store(index, "q")
    assert (cached(index, "abc"), cached(index, "xyz"), cached(index, "q")) == (3, 2, 1)
    store(index, "rs")
    assert (cached(index, "abc"), cached(index, "xyz"), cached(index, "q")) == (3, 0, 1)


def test_a_beginning_used_by_itself_stays_behind_its_end() -> None:
    index = PageIndex(5)
    store(index, "abc")
    store(index, "x")
    store(index, "ab")  # the beginning is used after x, its end before
    store(index, "yz")
    assert (cached(index, "abc"), cached(index, "x")) == (2, 1)
    store(index, "w")
    assert (cached(index, "abc"), cached(index, "x")) == (2, 0)


def test_a_pin_holds_all_before_it_and_room_is_exact() -> None:
    index = PageIndex(6)
    slots = store(index, "abcd")
    index.pin(np.array(slots[:2], np.int32))
    assert index.room == 4
    assert index.reserve(MINE, NO_PARENT, keys_of("vwxyz"), ids_of("vwxyz"), 1) is None
    assert cached(index, "abcd") == 4  # nothing went in vain
    made = index.reserve(MINE, NO_PARENT, keys_of("wxyz"), ids_of("wxyz"), 1)
    assert made is not None
    assert cached(index, "abcd") == 2
    assert index.room == 0
    index.commit(made, np.zeros(0, np.uint64))
    index.unpin(np.array(slots[:2], np.int32))
    check_index(index)
    assert (index.room, index.used) == (6, 2)


def test_of_a_store_cut_short_only_what_came_is_found() -> None:
    index = PageIndex(6)
    made = index.reserve(MINE, NO_PARENT, keys_of("abcd"), ids_of("abcd"), 1)
    assert made is not None
    assert index.match(MINE, keys_of("abcd"), ids_of("abcd")).reserved.tolist() == made.tolist()
    assert cached(index, "abcd") == 0
    assert index.commit(made, np.array([7, 8], np.uint64)) == 2
    check_index(index)
    assert (cached(index, "abcd"), index.used) == (2, 2)
    assert index.pages.sums[made[:2]].tolist() == [7, 8]


def test_a_bad_page_hides_what_hangs_on_it_and_goes_last() -> None:
    index = PageIndex(6)
    slots = store(index, "abcd")
    index.invalidate(slots[1])
    check_index(index)
    assert (cached(index, "abcd"), index.used) == (1, 4)
    again = store(index, "abc")  # the same keys, other slots
    assert not set(again[1:]) & set(slots)
    assert cached(index, "abcd") == 3
    store(index, "xyz")  # has to evict the end of the bad path; then the bad page is free, too
    assert (cached(index, "abc"), cached(index, "xyz")) == (3, 3)


def test_after_a_reset_nothing_is_found_and_what_is_held_comes_free_later() -> None:
    index = PageIndex(8)
    held = np.array(store(index, "ab"), np.int32)
    store(index, "abc")
    store(index, "x")
    index.pin(held)
    made = index.reserve(MINE, int(held[-1]), keys_of("abz")[2:], ids_of("z"), 1)
    assert made is not None
    assert index.reset() == 2
    check_index(index)
    assert (cached(index, "abc"), cached(index, "x"), index.used) == (0, 0, 3)
    assert index.commit(made, np.zeros(1, np.uint64)) == 0  # stored for nothing
    index.unpin(held)
    check_index(index)
    assert (index.used, index.room) == (0, 8)


def test_remembered_slots_are_proven_before_use() -> None:
    index = PageIndex(4)
    slots = np.array(store(index, "abc"), np.int32)
    assert index.proven(MINE, slots, ids_of("abcd")) == 3
    assert index.proven(MINE, slots, ids_of("ab")) == 2
    assert index.proven(MINE, slots, ids_of("abx")) == 2
    assert index.proven(YOURS, slots, ids_of("abc")) == 0
    assert index.proven(MINE, slots[1:], ids_of("bc")) == 0
    store(index, "vwxy")  # the slots are others' now
    assert index.proven(MINE, slots, ids_of("abc")) == 0


# ---- what is remembered ----


def test_a_memo_stays_within_its_bytes_and_forgets_the_oldest() -> None:
    memo = Memo(limit=3 * (ENTRY_BYTES + 40))
    for name in (b"a", b"b", b"c"):
        memo.put(name, np.zeros(10, np.int32))
    memo.put(b"a", np.ones(10, np.int32))
    memo.put(b"d", np.zeros(10, np.int32))
    assert [len(memo.get(name)) for name in (b"a", b"b", b"c", b"d")] == [10, 0, 10, 10]
    memo.put(b"e", np.zeros(1000, np.int32))
    assert [len(memo.get(name)) for name in (b"a", b"c", b"d", b"e")] == [0, 0, 0, 0]
    memo.put(b"a", np.ones(1, np.int32))
    memo.clear()
    assert not memo.get(b"a").size


def test_evicted_keys_are_remembered_until_they_are_written_over() -> None:
    gone = EvictedKeys()
    keys = keys_of("abc")
    gone.add(keys[:2])
    assert [key in gone for key in keys] == [True, True, False]
    gone.add(np.array([[keys[0, 0] + np.uint64(EVICTED_KEYS), 5]], np.uint64))
    assert [key in gone for key in keys] == [False, True, False]
    assert gone.total == 3


def test_first_pages_are_found_by_their_tokens() -> None:
    first = FirstPages()
    page = ids_of("a")[0]
    assert first.find(page) == -1
    first.add(page, 9)
    assert (first.find(page), first.find(ids_of("b")[0])) == (9, -1)
