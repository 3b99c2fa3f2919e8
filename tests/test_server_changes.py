"""Which message of a conversation is not what it was a turn before."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from server.changes import MAX_BRANCHES, Changed, Conversations
from server.fields import Message

SESSION = b"s"


def conversation(texts: Sequence[str]) -> list[Message]:
    """Users and assistants in turns."""
    roles = ("user", "assistant")
    return [Message(role=roles[at % 2], content=text) for at, text in enumerate(texts)]  # type: ignore[arg-type]


def test_a_conversation_that_goes_on_or_is_asked_again_has_not_changed() -> None:
    known = Conversations()
    for texts in ("a", "abc", "abc", "abcde", "abc"):
        assert known.changed(SESSION, conversation(texts)) is None


def test_the_first_message_that_differs_is_named_with_its_role() -> None:
    known = Conversations()
    known.changed(SESSION, conversation("abcde"))
    assert known.changed(SESSION, conversation("abXde")) == Changed(2, "user")
    assert known.changed(SESSION, conversation("abXYe")) == Changed(3, "assistant")
    assert str(Changed(3, "assistant")) == "3:assistant"


def test_a_role_or_a_name_that_differs_is_a_change() -> None:
    known = Conversations()
    known.changed(SESSION, [Message(role="user", content="x")])
    assert known.changed(SESSION, [Message(role="system", content="x")]) == Changed(0, "system")
    assert known.changed(SESSION, [Message(role="user", content="x", name="y")]) == Changed(0, "user")


def test_conversations_of_one_session_are_told_apart() -> None:
    known = Conversations()
    known.changed(SESSION, conversation("abc"))
    assert known.changed(SESSION, conversation("xyz")) == Changed(0, "user")
    assert known.changed(SESSION, conversation("abcde")) is None
    assert known.changed(SESSION, conversation("xyzvw")) is None


def test_sessions_know_nothing_of_each_other() -> None:
    known = Conversations()
    known.changed(SESSION, conversation("abc"))
    assert known.changed(b"other", conversation("xbc")) is None


def test_the_longest_unused_session_is_forgotten_first() -> None:
    known = Conversations(max_digests=6)
    known.changed(b"old", conversation("ab"))
    known.changed(b"new", conversation("ab"))
    known.changed(b"old", conversation("ab"))
    known.changed(b"third", conversation("abc"))
    assert known.changed(b"new", conversation("Xb")) is None
    assert known.changed(b"third", conversation("Xbc")) == Changed(0, "user")


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.text("xyz", min_size=1, max_size=6)), max_size=60))
def test_what_is_kept_stays_within_its_bounds(turns: list[tuple[bytes, str]]) -> None:
    known = Conversations(max_digests=20)
    for session, texts in turns:
        known.changed(session, conversation(texts))
        kept = [len(digests) for branches in known._sessions.values() for digests in branches]
        assert len(known) == sum(kept) <= 20
        assert all(len(branches) <= MAX_BRANCHES for branches in known._sessions.values())
