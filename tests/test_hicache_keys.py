"""Page keys, native and in Python: equal bytes, chained, and spread as if drawn at random."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache import _keys as keys_native
from hicache import keys_py
from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend, root
from hicache.native import load

TWINS: dict[str, ModuleType] = {"native": keys_native, "python": keys_py}
twins = pytest.mark.parametrize("keys", TWINS.values(), ids=TWINS.keys())
START = root(b"secret", b"caller")
# A page's key in both twins, so that an accidental change of the chain is seen: ids 0..127 behind an all-zero parent.
KNOWN_KEY = "c183e3ce96ef70c1607de69b2bd7e2dc"

Ids = npt.NDArray[np.int32]


def some_ids(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 150_000, count, np.int32)


def as_integer(key: bytes) -> int:
    return int.from_bytes(key, "little")


@given(st.binary(min_size=16, max_size=16), st.integers(0, 3 * PAGE_TOKENS), st.integers(0, 2**32))
@settings(deadline=None)
def test_both_twins_give_the_same_keys(parent: bytes, count: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(-(2**31), 2**31, count, np.int64).astype(np.int32)
    keys = keys_native.extend(parent, ids)
    assert keys == keys_py.extend(parent, ids)
    assert len(keys) == count // PAGE_TOKENS * KEY_BYTES


@twins
def test_the_chain_stays_what_it_is(keys: ModuleType) -> None:
    assert keys.extend(bytes(16), np.arange(PAGE_TOKENS, dtype=np.int32)).hex() == KNOWN_KEY


@twins
def test_a_chain_goes_on_from_any_key(keys: ModuleType) -> None:
    ids = some_ids(5 * PAGE_TOKENS + 17)
    whole = keys.extend(START, ids)
    for pages in range(6):
        head = keys.extend(START, ids[: pages * PAGE_TOKENS])
        tail = keys.extend(head[-KEY_BYTES:] or START, ids[pages * PAGE_TOKENS :])
        assert head + tail == whole


@twins
def test_a_key_depends_on_the_page_and_all_before_it_alone(keys: ModuleType) -> None:
    ids = some_ids(4 * PAGE_TOKENS)
    before = keys.extend(START, ids)
    ids[2 * PAGE_TOKENS] += 1  # the first token of the third page
    after = keys.extend(START, ids)
    assert after[: 2 * KEY_BYTES] == before[: 2 * KEY_BYTES]
    for page in (2, 3):
        assert after[page * KEY_BYTES :][:KEY_BYTES] != before[page * KEY_BYTES :][:KEY_BYTES]
    ids[2 * PAGE_TOKENS] -= 1
    ids[[0, 1]] = ids[[1, 0]]
    assert keys.extend(START, ids)[:KEY_BYTES] != before[:KEY_BYTES]


def test_another_root_gives_other_keys() -> None:
    ids = some_ids(50 * PAGE_TOKENS)
    mine, others = (np.frombuffer(extend(root(b"secret", name), ids), "V16") for name in (b"me", b"you"))
    assert not set(mine.tolist()) & set(others.tolist())


def test_every_bit_of_a_page_and_of_its_parent_turns_half_of_the_key() -> None:
    """Averaged over inputs, a turned bit turns each bit of the key with a probability near one half."""
    flips = np.zeros(128)
    trials = 0
    for seed in range(40):
        ids = some_ids(PAGE_TOKENS, seed)
        key = as_integer(keys_native.extend(START, ids))
        for bit in np.random.default_rng(seed).integers(0, PAGE_TOKENS * 32, 60).tolist():
            turned = ids.copy()
            turned.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
            flips += bits_of(key ^ as_integer(keys_native.extend(START, turned)))
            trials += 1
        for bit in range(128):
            parent = (as_integer(START) ^ 1 << bit).to_bytes(KEY_BYTES, "little")
            flips += bits_of(key ^ as_integer(keys_native.extend(parent, ids)))
            trials += 1
    # Seven standard deviations of a fair coin.
    assert (abs(flips / trials - 0.5) < 3.5 / trials**0.5).all()


def bits_of(number: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(number.to_bytes(KEY_BYTES, "little"), np.uint8))


def test_pages_that_differ_little_have_keys_that_differ() -> None:
    """One token that is not zero, or 128 equal ones: either half of the key alone tells a hundred thousand apart."""
    pages = np.zeros((100_000, PAGE_TOKENS), np.int32)
    numbers = np.arange(len(pages))
    pages[numbers, numbers % PAGE_TOKENS] = numbers // PAGE_TOKENS + 1
    keys = [keys_native.extend(bytes(16), page) for page in pages]
    keys += [keys_native.extend(bytes(16), np.full(PAGE_TOKENS, value, np.int32)) for value in range(1000)]
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
    for column in (0, 1):
        assert len(np.unique(words[:, column])) == len(words)


def test_keys_fill_buckets_evenly() -> None:
    keys = np.frombuffer(extend(START, some_ids(20_000 * PAGE_TOKENS)), np.uint64).reshape(-1, 2)
    filled = np.bincount((keys[:, 0] & np.uint64(1023)).astype(np.intp), minlength=1024)
    mean = len(keys) / 1024
    assert (abs(filled - mean) < 7 * mean**0.5).all()


@twins
def test_what_does_not_fit_is_refused(keys: ModuleType) -> None:
    with pytest.raises(ValueError, match="parent has 15 bytes instead of 16"):
        keys.extend(bytes(15), some_ids(PAGE_TOKENS))
    with pytest.raises(ValueError, match="ids have 8 bytes in 1 dimensions instead of 4 in one"):
        keys.extend(START, np.zeros(PAGE_TOKENS, np.int64))
    with pytest.raises(ValueError, match="ids have 4 bytes in 2 dimensions"):
        keys.extend(START, np.zeros((2, PAGE_TOKENS), np.int32))
    with pytest.raises(TypeError):
        keys.extend(START)


@twins
def test_read_only_ids_and_none_at_all_will_do(keys: ModuleType) -> None:
    ids = np.frombuffer(some_ids(PAGE_TOKENS).tobytes(), np.int32)
    assert not ids.flags.writeable
    assert len(keys.extend(START, ids)) == KEY_BYTES
    assert keys.extend(START, ids[:127]) == b""
    assert keys.extend(START, np.zeros(0, np.int32)) == b""


def test_roots_tell_their_parts_apart() -> None:
    parts = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"c", b"ab"), ()]
    assert len({root(*some) for some in parts}) == len(parts)
    assert {len(root(*some)) for some in parts} == {KEY_BYTES}


def test_without_the_native_module_the_twin_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = "hicache._keys", "hicache.keys_py"
    assert load(*modules) is keys_native
    monkeypatch.setitem(sys.modules, "hicache._keys", None)  # what an import finds if it is not built
    assert load(*modules) is keys_py
    assert "setup.py build_ext --inplace" in caplog.text
