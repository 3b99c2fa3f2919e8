"""Plans for models that keep more than pages: which states are stored, and which a hit needs."""

from __future__ import annotations

from hicache.keys import PAGE_TOKENS
from hicache.look import Reason
from tests.cache_calls import MINE, WITH_STATES, finish, ids_of, load, planner, run, slots, submit, why
from tests.cache_invariants import check_planner


def test_states_of_the_last_boundaries_are_stored_and_the_nearest_is_loaded() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    first = submit(cache, "abcdefg", tail=50)
    assert [pages for pages, _ in first.store_states] == [7, 6, 5, 4]
    finish(cache, first, states=[slot for _, slot in first.store_states[1:]])  # the last one did not come
    assert (cache.states_used, cache.rank_counts(0).states_stored) == (3, 3)
    assert why(cache, "abcdefgh", tail=50) == (6, Reason.NO_STATE)
    second = submit(cache, "abcdefgh")
    assert (second.load_state, len(slots(second.load))) == (first.store_states[1][1], 6)
    assert second.load_state_sum == 1000 + second.load_state
    assert [pages for pages, _ in second.store_states] == [8, 7]
    finish(cache, second, states=[slot for _, slot in second.store_states])
    assert cache.rank_counts(0).states_loaded == 1
    assert why(cache, "abcdxyz") == (4, Reason.NEVER_STORED)
    assert why(cache, "abcx") == (0, Reason.NO_STATE)
    assert why(cache, "abcdefgh", tail=20) == (7, Reason.KEEP_TOKENS)


def test_no_state_is_kept_below_the_first_or_beyond_the_window() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    assert submit(cache, "a").store_states == ()
    assert [pages for pages, _ in submit(cache, "xyz").store_states] == [3, 2]
    window = cache.rules._replace(state_window=268)
    assert [pages for pages, _ in submit(planner(states=8, rules=window), "abcdefg").store_states] == [7, 6, 5]


def test_a_twin_with_states_counts_on_the_states_that_come() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    first = submit(cache, "abcd")
    look = cache.look(MINE, ids_of("abcdef"))
    assert (look.waits_for, look.twin_tokens) == (first.plan, 4 * PAGE_TOKENS)


def test_the_state_used_least_recently_makes_room() -> None:
    cache = planner(states=2, rules=WITH_STATES)
    run(cache, "ab")
    run(cache, "xy")
    load(cache, submit(cache, "abc", tail=50))  # uses the state of "ab"; its own goes to the slot of "xy"
    assert (why(cache, "xyz", tail=50)[0], why(cache, "abz", tail=50)[0]) == (0, 2)
    assert cache.rank_counts(0).evicted_states == 1


def test_a_bad_state_is_not_loaded_again_but_its_pages_are_fine() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    run(cache, "abcd")
    plan = submit(cache, "abcdef")
    load(cache, plan, bad=len(slots(plan.load)))
    assert why(cache, "abcdef")[0] == 3
    assert cache.rank_counts(0).errors == 1


def test_the_walk_over_states_goes_round_and_takes_out_what_is_bad() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    assert cache.scrub_states.next_to_scrub() is None
    plan = submit(cache, "abc")
    assert cache.scrub_states.next_to_scrub() is None, "reserved is not stored"
    stored = [slot for _, slot in plan.store_states]
    finish(cache, plan, states=stored)
    expected = [(slot, 1000 + slot) for slot in sorted(stored)]
    for state in expected:
        assert cache.scrub_states.next_to_scrub() == state
        assert cache.scrub_states.done(state[0], ok=True)
    assert why(cache, "abcd", tail=50)[0] == 3
    assert cache.scrub_states.next_to_scrub() == expected[0] == (stored[0], 1000 + stored[0])
    assert cache.scrub_states.done(stored[0], ok=False)  # of the boundary behind three pages
    check_planner(cache)
    assert (cache.states_used, why(cache, "abcd", tail=50)[0]) == (len(stored) - 1, 2)


def test_what_was_read_of_a_state_that_has_made_room_counts_for_nothing() -> None:
    cache = planner(states=1, rules=WITH_STATES)
    run(cache, "ab")
    state = cache.scrub_states.next_to_scrub()
    assert state is not None
    run(cache, "xy")  # its state goes to the only slot
    assert not cache.scrub_states.done(state[0], ok=False)
    check_planner(cache)
    assert (why(cache, "abc", tail=50)[0], why(cache, "xyz", tail=50)[0]) == (0, 2)


def test_the_walk_over_states_changes_nothing_of_what_goes_first() -> None:
    cache = planner(states=2, rules=WITH_STATES)
    run(cache, "ab")
    run(cache, "xy")
    state = cache.scrub_states.next_to_scrub()
    assert state is not None
    cache.scrub_states.done(state[0], ok=True)
    run(cache, "mn")
    assert [why(cache, letters, tail=50)[0] for letters in ("abc", "xyz", "mno")] == [0, 2, 2]
