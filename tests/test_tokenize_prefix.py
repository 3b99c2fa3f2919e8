"""A text that begins with a known one is found by comparing the texts, within bounds."""

from __future__ import annotations

import numpy as np

from server.tokenizer.prefix import MAX_ENTRIES, MIN_CHARACTERS, Prefix, PrefixCache, Ranges

LONG = "".join(f"line {number}\n" for number in range(MIN_CHARACTERS // 5))


def entry(text: str, plain: Ranges = ()) -> Prefix:
    return Prefix(text, plain, np.arange(len(text), dtype=np.int32))


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache()
    for size in (2100, 2300, 2200):
        cache.add(entry(LONG[:size]))
    found = cache.find(LONG, ())
    assert found is not None
    assert found.text == LONG[:2300]
    assert (cache.counts().hits, cache.counts().misses) == (1, 0)


def test_another_text_of_the_same_end_is_not_taken() -> None:
    cache = PrefixCache()
    cache.add(entry("x" + LONG[1:2500]))
    cache.add(entry(LONG[:2400] + "x" * 10))
    cache.add(entry(LONG + "longer than what is asked for"))
    assert cache.find(LONG, ()) is None
    assert cache.counts().misses == 1


def test_the_whole_text_may_be_known() -> None:
    cache = PrefixCache()
    cache.add(entry(LONG))
    assert cache.find(LONG, ()) is not None


def test_ranges_of_plain_text_are_part_of_what_is_compared() -> None:
    cache = PrefixCache()
    cache.add(entry(LONG[:2300], ((100, 200),)))
    assert cache.find(LONG, ()) is None
    assert cache.find(LONG, ((100, 201),)) is None
    assert cache.find(LONG, ((100, 200), (2250, 2290))) is None
    assert cache.find(LONG, ((100, 200), (2300, 2400))) is not None


def test_short_texts_are_not_looked_for() -> None:
    cache = PrefixCache()
    cache.add(entry("short"))
    assert cache.find("short text", ()) is None
    assert cache.counts().misses == 0


def test_bytes_and_entries_are_bounded_and_the_least_used_go() -> None:
    one = entry(LONG[:2100])
    cache = PrefixCache(limit=3 * one.bytes)
    cache.add(one)
    for number in range(5):
        assert cache.find(LONG, ()) is not None
        cache.add(entry(f"{number}" + LONG[1:2100]))
        assert cache.counts().bytes <= 3 * one.bytes
    many = PrefixCache()
    for number in range(MAX_ENTRIES + 10):
        many.add(entry(f"{number:06}"))
    assert len(many._entries) == MAX_ENTRIES
    assert many.counts().bytes == sum(kept.bytes for kept in many._entries.values())
