"""The slot table against a plain dictionary: whom a record finds, and whom a late one does not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from server.slots import SlotTable
from server.stream import TokenStream

SIZE = 3


class _Slots(RuleBasedStateMachine):
    """Requests come and go in any order; every (slot, generation) ever given stays known to the test."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SIZE)
        self.open: dict[tuple[int, int], TokenStream] = {}

    @rule(target=places)
    def take(self) -> tuple[int, int]:
        stream = TokenStream()
        place = self.table.take(stream)
        if len(self.open) == SIZE:
            assert place is None
            return (0, 0)  # a generation no slot is ever given
        assert place is not None
        assert place not in self.open
        assert place[0] not in {slot for slot, _ in self.open}
        self.open[place] = stream
        return place

    @rule(place=places)
    def release(self, place: tuple[int, int]) -> None:
        if place in self.open:
            del self.open[place]
            self.table.release(place[0])

    @rule(place=places)
    def look_up(self, place: tuple[int, int]) -> None:
        assert self.table.find(*place) is self.open.get(place)

    @rule(slot=st.integers(0, 2**32 - 1), generation=st.integers(0, 2**32 - 1))
    def look_up_anything(self, slot: int, generation: int) -> None:
        assert self.table.find(slot, generation) is self.open.get((slot, generation))

    @rule()
    def release_all(self) -> None:
        assert set(self.table.release_all()) == set(self.open.values())
        self.open.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.table.taken == len(self.open)
        assert set(self.table.streams()) == set(self.open.values())


def test_slots_behave_like_a_dictionary() -> None:
    run_state_machine_as_test(_Slots)


def test_a_late_generation_finds_nobody() -> None:
    table = SlotTable(1)
    first = table.take(TokenStream())
    assert first is not None
    table.release(first[0])
    second_stream = TokenStream()
    second = table.take(second_stream)
    assert second is not None
    assert second[0] == first[0]
    assert table.find(*first) is None
    assert table.find(*second) is second_stream


def test_generations_go_on_after_a_rank_was_lost() -> None:
    table = SlotTable(1)
    before = table.take(TokenStream())
    table.release_all()
    after = table.take(TokenStream())
    assert before is not None
    assert after is not None
    assert after[1] != before[1]
    assert table.find(*before) is None
