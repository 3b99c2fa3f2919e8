"""Pages that a rank offers, what conversations and their hints change, and the scrubber's walk."""

from __future__ import annotations

from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend
from hicache.look import Look, Reason
from hicache.plan import Planner
from ipc.messages import CacheOffer, CacheStored
from tests.cache_calls import MINE, WITH_STATES, YOURS, finish, ids_of, planner, run, slots, submit, why
from tests.cache_invariants import check_planner

# ---- offers ----


def offer(
    cache: Planner, before: str, more: str, *, top: bytes = MINE, states: tuple[tuple[int, int], ...] = ()
) -> CacheOffer:
    parent = (extend(top, ids_of(before)) or top)[-KEY_BYTES:]
    ids = ids_of(more, tail=0)
    return CacheOffer(parent, extend(parent, ids), ids.tobytes(), states)


def test_what_was_generated_is_stored_behind_its_prompt() -> None:
    cache = planner()
    run(cache, "ab")
    store = cache.offered(0, offer(cache, "ab", "cd"))
    assert store is not None
    check_planner(cache)
    cache.stored(0, CacheStored(store.plan, 2, bytes(16)))
    check_planner(cache)
    assert why(cache, "abcd") == (4, Reason.FULL)
    longer = cache.offered(1, offer(cache, "ab", "cde"))
    assert longer is not None
    assert (len(slots(longer.store)), longer.keys) == (1, offer(cache, "abcd", "e").keys)
    cache.stored(1, CacheStored(longer.plan, 0))
    check_planner(cache)
    assert (cache.rank_counts(1).inflight, cache.rank_counts(0).lookups) == (0, 1)


def test_an_offer_behind_a_short_prompt_begins_at_its_root() -> None:
    cache = planner()
    assert cache.offered(0, offer(cache, "", "ab")) is None  # no such root
    finish(cache, submit(cache, "", tail=9))
    store = cache.offered(0, offer(cache, "", "ab"))
    assert store is not None
    cache.stored(0, CacheStored(store.plan, 2, bytes(16)))
    assert why(cache, "ab") == (2, Reason.FULL)
    assert why(cache, "ab", top=YOURS) == (0, Reason.OTHER_NAMESPACE)


def test_an_offer_behind_pages_that_are_being_stored_can_be_made_again() -> None:
    cache, stores = planner(), list[object]()
    plan = submit(cache, "ab")
    early = offer(cache, "ab", "c")
    assert cache.offered(0, early) is None
    assert (cache.storing(early.parent), cache.storing(MINE)) == (plan.plan, None)
    cache.settled(plan.plan, lambda: stores.append(cache.offered(0, early)))
    assert stores == []
    finish(cache, plan)
    assert len(stores) == 1
    assert stores[0] is not None
    assert cache.storing(early.parent) is None
    check_planner(cache)


def test_after_a_reset_no_offer_goes_on_from_a_root_of_before() -> None:
    cache = planner()
    run(cache, "ab")
    cache.reset()
    assert cache.offered(0, offer(cache, "", "xy")) is None
    assert cache.offered(0, offer(cache, "ab", "c")) is None
    assert cache.pages_used == 0


def test_offers_that_lead_nowhere_are_declined() -> None:
    cache = planner(pages=4)
    run(cache, "ab")
    assert cache.offered(0, offer(cache, "ax", "b")) is None  # behind nothing
    assert cache.offered(0, offer(cache, "a", "b")) is None  # is here
    assert cache.offered(0, offer(cache, "ab", "cde")) is None  # too many
    assert cache.rank_counts(0).errors == 0
    good = offer(cache, "ab", "c")
    for broken in (
        CacheOffer(good.parent, bytes(KEY_BYTES), good.ids),
        CacheOffer(good.parent[1:], good.keys, good.ids),
        CacheOffer(good.parent, good.keys, good.ids[1:]),
        CacheOffer(good.parent, good.keys, good.ids, ((0, 5),)),  # a state behind none of its pages
        CacheOffer(good.parent, good.keys, good.ids, ((2, 5),)),
    ):
        assert cache.offered(0, broken) is None
    assert cache.rank_counts(0).errors == 5
    check_planner(cache)
    submit(cache, "abc")
    assert cache.offered(0, good) is None  # on its way


# ---- offers of models with states ----


def test_the_state_behind_what_was_generated_is_stored_with_it() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    run(cache, "ab")
    store = cache.offered(0, offer(cache, "ab", "cd", states=((2, 71), (1, 70))))
    assert store is not None
    check_planner(cache)
    assert ([name for name, _ in store.states], len(slots(store.store))) == ([71, 70], 2)
    sums = tuple((slot, 1000 + name) for name, slot in store.states)
    cache.stored(0, CacheStored(store.plan, 2, bytes(16), sums[:1]))  # the other one came too late
    check_planner(cache)
    assert why(cache, "abcdefg") == (4, Reason.NEVER_STORED)
    assert why(cache, "abcxyz") == (2, Reason.NO_STATE)
    following = submit(cache, "abcdefg")
    assert (following.load_state, following.load_state_sum) == (store.states[0][1], 1071)


def test_pages_whose_states_are_gone_are_declined() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    run(cache, "ab")
    assert cache.offered(0, offer(cache, "ab", "cd")) is None
    assert cache.pages_used == 2


def test_a_state_is_stored_behind_pages_that_are_here_without_it() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    run(cache, "ab")
    for states in (((2, 3),), ((2, 8), (1, 7))):
        store = cache.offered(0, offer(cache, "ab", "cd", states=states))
        assert store is not None
        done = len(slots(store.store))
        cache.stored(0, CacheStored(store.plan, done, bytes(8 * done), tuple((slot, 9) for _, slot in store.states)))
        check_planner(cache)
        last = store
    assert ([name for name, _ in last.states], last.keys, last.store) == ([7], b"", b"")
    assert cache.offered(0, offer(cache, "ab", "cd", states=((2, 12), (1, 11)))) is None
    assert (cache.rank_counts(0).states_stored, cache.rank_counts(0).inflight) == (3, 0)


def test_a_state_goes_with_pages_that_could_not_be_stored() -> None:
    cache = planner(states=8, rules=WITH_STATES)
    run(cache, "ab")
    before = cache.states_used
    store = cache.offered(0, offer(cache, "ab", "cd", states=((2, 1), (1, 0))))
    assert store is not None
    cache.stored(0, CacheStored(store.plan, 1, bytes(8), tuple((slot, 9) for _, slot in store.states)))
    check_planner(cache)
    assert (cache.states_used, why(cache, "abcd", tail=50)[0]) == (before + 1, 3)


# ---- conversations and the scrubber ----


def test_a_hint_changes_nothing_but_the_work() -> None:
    cache = planner(pages=8)
    for letters, top in [
        ("abc", MINE),
        ("abcd", MINE),
        ("", MINE),
        ("abx", MINE),
        ("abcd", YOURS),
        ("vwxyz", YOURS),
        ("abcd", MINE),
    ]:
        plain, hinted = cache.look(top, ids_of(letters)), cache.look(top, ids_of(letters), b"talk")
        assert view(plain) == view(hinted)
        finish(cache, cache.plan(0, hinted, reuse=True))


def test_a_short_prompt_of_a_conversation_has_none_of_its_pages() -> None:
    cache = planner()
    long = cache.plan(0, cache.look(MINE, ids_of("abc"), b"talk"), reuse=True)
    finish(cache, long)
    for reuse in (True, False):
        plan = cache.plan(0, cache.look(MINE, ids_of("", 20), b"talk"), reuse=reuse)
        assert (plan.keys, plan.load, plan.store_from, plan.store) == (b"", b"", 0, b"")
        finish(cache, plan)
    assert cache.look(MINE, ids_of("abcd"), b"talk").cached_tokens == 3 * PAGE_TOKENS


def view(look: Look) -> tuple[object, ...]:
    return look.keys, look.cached_tokens, look.reason, look.waits_for, look.twin_tokens, look.ready.tolist()


def test_the_scrubber_goes_round_and_takes_out_what_is_bad() -> None:
    cache = planner()
    assert cache.scrub.next_to_scrub() is None
    first = run(cache, "abc")
    seen = []
    for _ in range(4):
        got = cache.scrub.next_to_scrub()
        assert got is not None
        check_planner(cache)
        cache.scrub.done(got[0], ok=True)
        seen.append(got)
    stored = list(zip(slots(first.store), [100, 101, 102], strict=True))
    assert seen == [*stored, stored[0]]
    got = cache.scrub.next_to_scrub()
    assert got == stored[1]
    cache.scrub.done(got[0], ok=False)
    check_planner(cache)
    assert why(cache, "abc")[0] == 1
    assert (cache.scrub.checked, cache.scrub.bad) == (5, 1)


def test_a_page_in_the_scrubbers_hand_is_not_evicted() -> None:
    cache = planner(pages=3)
    run(cache, "ab")
    got = cache.scrub.next_to_scrub()
    assert got is not None
    assert submit(cache, "xyz").store == b""
    cache.scrub.done(got[0], ok=True)
    run(cache, "xyz")
    assert why(cache, "ab") == (0, Reason.EVICTED)


def test_the_scrubber_changes_nothing_of_what_goes_first() -> None:
    cache = planner(pages=2)
    run(cache, "a")
    run(cache, "x")
    got = cache.scrub.next_to_scrub()
    assert got is not None
    cache.scrub.done(got[0], ok=True)
    run(cache, "n")
    assert [why(cache, letter)[0] for letter in "axn"] == [0, 1, 1]
