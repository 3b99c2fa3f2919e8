"""A text that begins with a known one is found by comparing the texts, within bounds."""

from __future__ import annotations

import numpy as np

from server.tokenizer.prefix import MAX_ENTRIES, MIN_CHARACTERS, Prefix, PrefixCache, Ranges

LONG = "".join(f"line {number}\n" for number in range(MIN_CHARACTERS // 5))


def add(cache: PrefixCache, text: str, plain: Ranges = (), parent: Prefix | None = None) -> None:
    cache.add(text, plain, np.arange(len(text), dtype=np.int32), parent)


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache()
    for size in (2100, 2300, 2200):
        add(cache, LONG[:size])
    found = cache.find(LONG, ())
    assert found is not None
    assert found.text == LONG[:2300]
    assert (cache.counts().hits, cache.counts().misses) == (1, 0)


def test_another_text_of_the_same_end_is_not_taken() -> None:
    cache = PrefixCache()
    add(cache, "x" + LONG[1:2500])
    add(cache, LONG[:2400] + "x" * 10)
    add(cache, LONG + "longer than what is asked for")
    assert cache.find(LONG, ()) is None
    assert cache.counts().misses == 1


def test_the_whole_text_may_be_known() -> None:
    cache = PrefixCache()
    add(cache, LONG)
    assert cache.find(LONG, ()) is not None


def test_ranges_of_plain_text_are_part_of_what_is_compared() -> None:
    cache = PrefixCache()
    add(cache, LONG[:2300], ((100, 200),))
    assert cache.find(LONG, ()) is None
    assert cache.find(LONG, ((100, 201),)) is None
    assert cache.find(LONG, ((100, 200), (2250, 2290))) is None
    assert cache.find(LONG, ((100, 200), (2300, 2400))) is not None


def test_short_texts_are_not_looked_for() -> None:
    cache = PrefixCache()
    add(cache, "short")
    assert cache.find("short text", ()) is None
    assert cache.counts().misses == 0


def test_bytes_and_entries_are_bounded_and_the_least_used_go() -> None:
    one = Prefix(LONG[:2100], (), np.arange(2100, dtype=np.int32))
    cache = PrefixCache(limit=3 * one.bytes)
    add(cache, one.text)
    for number in range(5):
        assert cache.find(LONG, ()) is not None
        add(cache, f"{number}" + LONG[1:2100])
        assert cache.counts().bytes <= 3 * one.bytes
    many = PrefixCache()
    for number in range(MAX_ENTRIES + 10):
        add(many, f"{number:06}")
    assert len(many._entries) == MAX_ENTRIES
    assert many.counts().bytes == sum(kept.bytes for kept in many._entries.values())


def test_a_conversation_of_many_turns_keeps_a_few_entries() -> None:
    cache = PrefixCache()
    text = LONG
    while len(text) < 20 * len(LONG):
        add(cache, text, (), cache.find(text, ()))
        text += "another turn\n" * 50
    kept = [len(entry.text) for entry in cache._entries.values()]
    assert len(kept) < 12
    assert kept == sorted(kept)
    assert cache.counts().bytes == sum(entry.bytes for entry in cache._entries.values())
    # Another branch begins at one of them.
    assert cache.find(LONG + "something else", ()) is not None
