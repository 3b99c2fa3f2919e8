"""What names a conversation, and how long its rank is remembered."""

from __future__ import annotations

import pytest

from server.affinity import PREFIX_CHARS, SESSION_HEADERS, Homes, session_key


def test_a_session_header_outweighs_the_words_and_the_first_header_the_others() -> None:
    first, second = SESSION_HEADERS[:2]
    assert session_key({first: "s"}, "hello") == session_key({first: "s", second: "t"}, "bye")
    assert session_key({first: "s"}, "hello") != session_key({first: "t"}, "hello")
    # The same value under another name is another client's idea of a session.
    assert session_key({first: "s"}, "hello") != session_key({second: "s"}, "hello")


def test_without_a_header_the_first_words_count() -> None:
    words = "x" * PREFIX_CHARS
    assert session_key({}, words + "a") == session_key({}, words + "b")
    assert session_key({}, "a") != session_key({}, "b")
    assert session_key({}, "\ud800")  # a lone surrogate is no reason to fail


def test_homes_forget_the_longest_unused() -> None:
    homes = Homes(limit=2)
    for key, index in ((b"a", 0), (b"b", 1), (b"a", 0), (b"c", 1)):
        homes.settle(key, index)
    assert (homes.find(b"a"), homes.find(b"b"), homes.find(b"c")) == (0, None, 1)
    assert len(homes) == 2


@pytest.mark.parametrize(("ttl_s", "found"), [(1000.0, 3), (-1.0, None)])
def test_homes_expire(ttl_s: float, found: int | None) -> None:
    homes = Homes(ttl_s=ttl_s)
    homes.settle(b"a", 3)
    assert homes.find(b"a") == found
