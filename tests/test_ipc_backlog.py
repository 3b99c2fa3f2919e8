"""The engine's outbox: one order for events and records, whatever the two rings have room for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ipc.backlog
from ipc.backlog import Backlog
from ipc.errors import BacklogFullError, MessageTooLargeError
from ipc.layout import TOKEN_BYTES, TOKEN_DTYPE
from ipc.ring import (
    HEADER_BYTES,
    MessageReader,
    MessageWriter,
    TokenReader,
    TokenWriter,
    format_message_ring,
    format_token_ring,
)
from tests.ipc_twins import shared_memory

EVENT_BYTES = 64
RECORDS = 4


class Outbox:
    """A backlog with both rings' other ends."""

    def __init__(self, events: memoryview, tokens: memoryview) -> None:
        format_message_ring(events, EVENT_BYTES)
        format_token_ring(tokens, RECORDS)
        self.writers = MessageWriter(events), TokenWriter(tokens)
        self.events, self.tokens = MessageReader(events), TokenReader(tokens)
        self.backlog = Backlog(self.writers[0], EVENT_BYTES, self.writers[1])

    def close(self) -> None:
        for end in (*self.writers, self.events, self.tokens):
            end.close()


@contextmanager
def outbox() -> Iterator[Outbox]:
    with (
        shared_memory(HEADER_BYTES + EVENT_BYTES) as events,
        shared_memory(HEADER_BYTES + RECORDS * TOKEN_BYTES) as tokens,
    ):
        box = Outbox(events, tokens)
        try:
            yield box
        finally:
            box.close()


def numbered(first: int, count: int) -> npt.NDArray[np.void]:
    records = np.zeros(count, TOKEN_DTYPE)
    records["token"] = np.arange(first, first + count)
    return records


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 7), st.integers(0, 4)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("drain"), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_no_record_overtakes_its_event(actions: list[tuple[str, int, int]]) -> None:
    with outbox() as box:
        published = records_seen = 0
        events_published: list[bytes] = []
        events_seen: list[bytes] = []

        def drain(limit: int) -> None:
            nonlocal records_seen
            records = box.tokens.pop(limit)
            events_seen.extend(box.events.pop_all())
            assert records["token"].tolist() == list(range(records_seen, records_seen + len(records)))
            records_seen += len(records)
            # An event carries the number of the first record behind it.
            due = [event for event in events_published if int(event) < records_seen]
            assert events_seen[: len(due)] == due

        for action, number, events in actions:
            if action == "publish":
                news = [b"%d" % published] * events
                records = numbered(published, number)
                box.backlog.publish(records, news)
                records["token"] = -1  # the engine fills its array again
                events_published += news
                published += number
            elif action == "flush":
                assert box.backlog.flush() is not bool(box.backlog)
            else:
                drain(number)
        while not box.backlog.flush():
            drain(RECORDS)
        drain(RECORDS)
        assert records_seen == published
        assert events_seen == events_published


def test_an_impossible_event_is_refused_before_anything_is_published() -> None:
    with outbox() as box:
        with pytest.raises(MessageTooLargeError, match="57 bytes is above 56"):
            box.backlog.publish(numbered(0, 2), [b"small", bytes(57)])
        assert not box.backlog
        assert box.events.pop_all() == []
        assert box.tokens.waiting() == 0
        box.backlog.publish(numbered(0, 2), [bytes(56)])
        assert box.events.pop_all() == [bytes(56)]


def test_a_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc.backlog, "MAX_BACKLOG_BYTES", 10 * TOKEN_BYTES)
    with outbox() as box:
        box.backlog.publish(numbered(0, RECORDS + 20), [])  # one step, however large, is taken
        with pytest.raises(BacklogFullError, match=f"{20 * TOKEN_BYTES} bytes wait for the server and 32 more"):
            box.backlog.publish(numbered(24, 1), [])
        seen: list[int] = []
        while not box.backlog.flush():
            seen += box.tokens.pop(RECORDS)["token"].tolist()
        seen += box.tokens.pop(RECORDS)["token"].tolist()
        assert seen == list(range(24))
        box.backlog.publish(numbered(24, 1), [])
        assert box.tokens.pop(1)["token"].tolist() == [24]
