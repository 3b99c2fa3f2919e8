"""What an engine reuses and keeps of prompts: one answer to each plan in every phase, right bytes, no block left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages import CacheLoaded, CacheOffer, CacheStore, CacheStored
from tests.offload_device import (
    PAGE_BYTES,
    STATE_ROWS,
    Admitted,
    Device,
    answers_to_the_end,
    device_of,
    keys_of,
    plan_of,
    prompt,
)


def bytes_of(device: Device, blocks: list[int]) -> list[int]:
    """What fills each of these blocks."""
    assert (device.pages[blocks] == device.pages[blocks, :1]).all()
    return [int(page) for page in device.pages[blocks, 0]]


def test_pages_come_from_the_host_and_go_there() -> None:
    tokens = prompt(4)
    with device_of() as device:
        one = device.admit(tokens, plan_of(tokens, load=[7, 3], store_from=2, store=[9, 5]))
        assert one.load_to_the_end() == 1  # the other page came with the admission
        assert (one.prefix.pages, bytes_of(device, one.held[:2])) == (2, [107, 103])
        assert device.answers() == [CacheLoaded(1, host_tokens=256)]
        one.compute()
        one.leave()
        events = answers_to_the_end(device)
        assert [page[0] for page in device.pool.pages[[9, 5]]] == one.held[2:4]
        sums = device.transfer.page_sums(np.array([9, 5], np.uint32))
        assert events == [CacheStored(1, 2, sums.tobytes())]


def test_without_decodes_nothing_waits() -> None:
    tokens = prompt(4)
    with device_of() as device:
        device.transfer.bytes_per_second = 1e12
        device.offload.attach(device.transfer, PAGE_BYTES)
        one = device.admit(tokens, plan_of(tokens, load=[1, 2, 3, 4]))
        device.offload.pump(decoding=False)
        assert not one.prefix.loading
        assert device.answers() == [CacheLoaded(1, host_tokens=512)]
        one.leave()


def test_what_is_on_the_device_is_shared_and_not_copied() -> None:
    tokens = prompt(4)
    with device_of() as device:
        first = device.admit(tokens, plan_of(tokens))
        assert device.offload.find(first.prefix, tokens) == []  # not before it is computed
        first.compute()
        second = device.admit(tokens, plan_of(tokens, 2, load=[7]))
        assert (second.shared, second.prefix.pages, second.prefix.loading) == (first.held[:4], 4, False)
        apart = device.admit(tokens, plan_of(tokens, 3, reuse=False))
        assert apart.shared == []
        assert device.answers() == [CacheLoaded(1), CacheLoaded(2, device_tokens=512), CacheLoaded(3)]
        first.end()
        second.leave()
        apart.leave()
        third = device.admit(tokens[:257], plan_of(tokens[:257], 4))
        assert third.shared == first.held[:2]
        third.leave()
        device.answers()


def test_the_last_token_is_always_computed() -> None:
    tokens = prompt(2, more=0)
    with device_of() as device:
        first = device.admit(tokens, plan_of(tokens))
        first.compute()
        second = device.admit(tokens, plan_of(tokens, 2))
        assert second.shared == first.held[:1]
        first.leave()
        second.leave()
        device.answers()


def test_pages_on_the_device_save_copies_of_the_first_ones() -> None:
    tokens = prompt(3)
    with device_of() as device:
        first = device.admit(tokens[:130], plan_of(tokens[:130]))
        first.compute()
        second = device.admit(tokens, plan_of(tokens, 2, load=[7, 8, 9]))
        second.load_to_the_end()
        assert bytes_of(device, second.held[:3]) == [first.held[0], 108, 109]
        assert device.answers()[-1] == CacheLoaded(2, device_tokens=128, host_tokens=256)
        first.leave()
        second.leave()


def test_loaded_pages_are_found_by_others_at_once() -> None:
    tokens = prompt(2)
    with device_of() as device:
        first = device.admit(tokens, plan_of(tokens, load=[7, 8]))
        first.load_to_the_end()
        second = device.admit(tokens, plan_of(tokens, 2, load=[7, 8]))
        assert second.shared == first.held[:2]
        first.leave()
        second.leave()
        device.answers()


def until_admitted(one: Admitted) -> None:
    pass


def until_computed(one: Admitted) -> None:
    one.load_to_the_end()
    one.compute()


def until_half_stored(one: Admitted) -> None:
    until_computed(one)
    one.device.offload.pump(decoding=True)


@pytest.mark.parametrize("phase", [until_admitted, Admitted.load_to_the_end, until_computed, until_half_stored])
@pytest.mark.parametrize("leave", [Admitted.leave, Admitted.end])
def test_a_request_that_leaves_in_any_phase_is_answered_once(
    phase: Callable[[Admitted], object], leave: Callable[[Admitted], None]
) -> None:
    tokens = prompt(5)
    with device_of() as device:
        one = device.admit(tokens, plan_of(tokens, load=[7, 8, 9], store=[10, 11], store_from=3))
        phase(one)
        if leave is Admitted.end and not one.prefix.computed:
            leave = Admitted.leave
        leave(one)
        events = answers_to_the_end(device)
        assert sorted(type(event).__name__ for event in events) == ["CacheLoaded", "CacheStored"]
        (stored,) = (event for event in events if isinstance(event, CacheStored))
        assert stored.pages == (2 if one.prefix.computed else 0)
        device.offload.close(None)


def test_one_that_was_never_admitted_is_answered_too() -> None:
    tokens = prompt(3)
    with device_of() as device:
        prefix = device.offload.open(plan_of(tokens, load=[7], store=[1], store_from=1), tokens)
        device.offload.close(prefix)
        assert device.answers() == [CacheLoaded(1), CacheStored(1)]


def test_after_preemption_only_the_device_is_asked() -> None:
    tokens = prompt(5)
    with device_of() as device:
        one = device.admit(tokens, plan_of(tokens, load=[7, 8, 9]))
        assert one.prefix.pages == 1
        device.offload.pause(one.prefix, tokens[:0], one.held)
        device.blocks.give_back(one.held)
        assert device.answers() == [CacheLoaded(1, host_tokens=128)]
        lost = one.held[0]
        one.admit()
        assert (one.held[0], one.prefix.pages, one.prefix.loading) == (lost, 1, False)
        one.compute()
        device.offload.pause(one.prefix, tokens[:513], one.held)
        device.blocks.give_back(one.held)
        before = one.held
        one.tokens = np.concatenate([tokens, prompt(1, seed=3)])
        one.admit()
        assert one.shared == before[:5]
        assert device.answers() == []
        one.leave()


def test_new_pages_are_offered_and_stored_as_far_as_they_are_still_here() -> None:
    tokens = prompt(4)
    with device_of(blocks=6) as device:
        one = device.admit(tokens[:200], plan_of(tokens[:200]))
        one.compute()
        one.tokens, one.held = tokens, one.held + [device.blocks.take() for _ in range(3)]
        held = one.held
        one.end()
        _, offer = device.offload.take_events()
        keys = keys_of(tokens)
        assert offer == CacheOffer(keys[0], b"".join(keys[1:]), tokens[128:512].tobytes())
        taken = [device.blocks.take() for _ in range(3)]  # the blank one, the unwhole one, and the last page's
        assert held[3] in taken
        device.offload.store(CacheStore(5, offer.keys, np.array([4, 5, 6], "<u4").tobytes()))
        device.blocks.give_back(taken)
        (stored,) = answers_to_the_end(device)
        assert stored.pages == 2
        assert device.pool.pages[[4, 5], 0].tolist() == held[1:3]
        device.offload.store(CacheStore(6, keys[3], np.array([4], "<u4").tobytes()))
        assert device.answers() == [CacheStored(6)]


def test_states_of_an_answer_are_kept_until_the_host_has_room_for_them() -> None:
    with device_of(blocks=8, states=True) as device:
        offer = answer(device, 1, first_state=10)
        assert [pages for pages, _ in offer.states] == [3, 2]  # of the three: behind all, and one before
        device.states[:STATE_ROWS] = 0  # another sequence has these rows now
        command = CacheStore(5, offer.keys, np.array([4, 5, 6], "<u4").tobytes(), at_slots(offer, [2, 1]))
        device.offload.store(command)
        (stored,) = answers_to_the_end(device)
        assert (stored.pages, [slot for slot, _ in stored.states]) == (3, [2, 1])
        assert device.pool.states[[2, 1], 0].tolist() == [14, 13]


def answer(device: Device, number: int, first_state: int) -> CacheOffer:
    """One that adds three pages to its prompt's one; the state behind i pages has bytes `first_state` + i."""
    tokens = prompt(4)
    one = device.admit(tokens[:200], plan_of(tokens[:200], number, reuse=False))
    one.compute()
    one.tokens, one.held = tokens, one.held + [device.blocks.take() for _ in range(3)]
    device.states[:STATE_ROWS] = first_state + np.arange(STATE_ROWS)[:, None]
    one.end()
    (offer,) = [event for event in device.offload.take_events() if isinstance(event, CacheOffer)]
    return offer


def at_slots(offer: CacheOffer, slots: list[int]) -> tuple[tuple[int, int], ...]:
    """An answer that has a host slot for each of the offered states."""
    return tuple((name, slot) for (_, name), slot in zip(offer.states, slots, strict=True))


def test_a_state_that_newer_ones_have_driven_out_is_not_stored() -> None:
    with device_of(blocks=8, states=True) as device:
        offers = [answer(device, 1, first_state=10), answer(device, 2, first_state=20)]
        device.offload.store(CacheStore(5, b"", b"", at_slots(offers[0], [3, 0])))
        device.offload.store(CacheStore(6, b"", b"", at_slots(offers[1], [2, 1])))
        device.offload.store(CacheStore(7, b"", b"", ((99, 0),)))
        never, first, second = answers_to_the_end(device)
        assert never == CacheStored(7)
        # Three rows: the second answer's two states and one of the first's, whose other one is gone.
        assert (first.pages, [slot for slot, _ in first.states], device.pool.states[0, 0]) == (0, [0], 13)
        assert [slot for slot, _ in second.states] == [2, 1]
        assert device.pool.states[[2, 1, 3], 0].tolist() == [24, 23, 203]


def test_what_is_forgotten_is_neither_found_nor_made_known_later() -> None:
    tokens = prompt(2)
    with device_of() as device:
        before = device.admit(tokens, plan_of(tokens))
        device.offload.forget()
        before.compute()
        before.end()
        after = device.admit(tokens, plan_of(tokens, 2))
        assert after.shared == []
        assert device.blocks.cached == 0
        after.leave()
        device.answers()


def test_blocks_that_only_stores_hold_can_be_had_at_once() -> None:
    tokens = prompt(5)
    with device_of() as device:
        for number in (1, 2):
            one = device.admit(tokens, plan_of(tokens, number, store=[number, 3 + number], reuse=False))
            one.compute()
            one.leave()
        used = device.blocks.used
        assert device.offload.relieve()
        assert device.blocks.used < used
        assert device.offload.relieve()
        assert not device.offload.relieve()
        assert [type(event) for event in device.answers()] == [CacheLoaded, CacheLoaded, CacheStored, CacheStored]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"load": [1, 2, 3, 4]}, "plan 1 loads 4 pages of 385 tokens"),
        ({"store_from": 2, "store": [1, 2]}, "plan 1 stores pages beyond the 3 of its prompt"),
        ({"load": [1]}, "plan 1 loads pages without the state behind them"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    tokens = prompt(3)
    with device_of(states="state" in told) as device:
        with pytest.raises(ValueError, match=told):
            device.offload.open(plan_of(tokens, **change), tokens)
        with pytest.raises(ValueError, match="plan 1 has 3 keys for 1 pages"):
            device.offload.open(plan_of(tokens), tokens[:200])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=8))
def test_any_mix_of_requests_is_answered_and_leaves_nothing(plans: list[tuple[int, int, int, bool]]) -> None:
    """Prompts of few contents with up to three pages to load, cut off after some steps or brought to their end."""
    with device_of(blocks=60) as device:
        running: list[tuple[Admitted, int, bool]] = []
        for number, (pages, load, steps, ends) in enumerate(plans):
            tokens = prompt(pages, seed=0)
            plan = plan_of(tokens, number, load=list(range(min(load, pages))), store=list(range(number % (pages + 1))))
            running.append((device.admit(tokens, plan), steps, ends))
        events = []
        for step in range(40):
            for one, _, ends in [entry for entry in running if entry[1] == step % 7]:
                if ends:
                    one.load_to_the_end()
                    one.compute()
                    one.end()
                else:
                    one.leave()
            running = [entry for entry in running if entry[1] != step % 7]
            device.offload.pump(decoding=True)
            events += device.answers()
        loaded = [event.plan for event in events if isinstance(event, CacheLoaded)]
        stored = [event.plan for event in events if isinstance(event, CacheStored)]
        assert sorted(loaded) == list(range(len(plans)))
        assert sorted(stored) == [number for number, (pages, *_) in enumerate(plans) if number % (pages + 1)]
