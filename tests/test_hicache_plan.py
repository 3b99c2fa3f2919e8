"""Plans one by one: what a rank is told, what its answers change, what is counted, and what becomes of a lost plan."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.keys import PAGE_TOKENS, extend
from hicache.look import Reason
from ipc.messages import CacheLoaded, CacheStored
from tests.cache_calls import MINE, YOURS, finish, ids_of, load, planner, run, slots, submit, why
from tests.cache_invariants import check_planner

# ---- what a plan says ----


def test_a_first_prompt_is_stored_and_the_next_turn_loads_it() -> None:
    cache = planner(verify_loads=True)
    first = submit(cache, "abc")
    assert (first.load, first.store_from, len(slots(first.store)), first.load_state) == (b"", 0, 3, -1)
    assert first.keys == extend(MINE, ids_of("abc"))
    finish(cache, first)
    second = submit(cache, "abcde", rank=1)
    assert slots(second.load) == slots(first.store)
    assert second.load_sums == np.array([100, 101, 102], np.uint64).tobytes()
    assert (second.store_from, len(slots(second.store)), second.reuse) == (3, 2, True)
    assert not set(slots(second.store)) & set(slots(first.store))
    finish(cache, second, rank=1)
    assert (cache.pages_used, why(cache, "abcde")) == (5, (5, Reason.FULL))


def test_sums_travel_only_where_loads_are_checked() -> None:
    cache = planner()
    run(cache, "ab")
    assert submit(cache, "abc").load_sums == b""


def test_the_last_tokens_of_a_prompt_are_always_computed() -> None:
    cache = planner()
    run(cache, "abc")
    assert why(cache, "abc", tail=0) == (2, Reason.KEEP_TOKENS)
    plan = submit(cache, "abc", tail=0)
    assert (len(slots(plan.load)), plan.store_from, plan.store) == (2, 3, b"")
    finish(cache, plan)


def test_a_bypass_loads_nothing_but_stores_what_is_lacking() -> None:
    cache = planner()
    run(cache, "ab")
    look = cache.look(MINE, ids_of("abc"))
    plan = cache.plan(0, look, reuse=False)
    assert (plan.load, plan.store_from, len(slots(plan.store)), plan.reuse) == (b"", 2, 1, False)
    assert (look.cached_tokens, look.reason) == (0, Reason.BYPASSED)
    finish(cache, plan)
    assert cache.rank_counts(0).lookups == 1  # the bypass is none


def test_a_plan_is_made_from_what_is_there_now_not_at_the_look() -> None:
    cache = planner(pages=4)
    run(cache, "abc")
    look = cache.look(MINE, ids_of("abcd"))
    run(cache, "wxyz", top=YOURS)  # evicts all of it
    plan = cache.plan(0, look, reuse=True)
    assert (plan.load, look.cached_tokens, look.reason) == (b"", 0, Reason.EVICTED)
    finish(cache, plan)


def test_equal_keys_of_other_tokens_share_nothing() -> None:
    cache = planner()
    first = run(cache, "abc")
    look = cache.look(MINE, ids_of("xyz"))
    look.keys, look.version = first.keys, -1  # as if the hash had collided on every page
    plan = cache.plan(0, look, reuse=True)
    assert (plan.load, plan.store_from) == (b"", 0)
    assert not set(slots(plan.store)) & set(slots(first.store))
    finish(cache, plan)
    assert set(slots(submit(cache, "abcd").load)) <= set(slots(first.store))


def test_a_prompt_larger_than_the_pool_evicts_nothing() -> None:
    cache = planner(pages=4)
    run(cache, "ab")
    plan = submit(cache, "vwxyz")
    assert plan.store == b""
    finish(cache, plan)
    counts = cache.rank_counts(0)
    assert (counts.store_skipped, counts.store_no_room, counts.evicted_pages) == (1, 1, 0)
    assert why(cache, "ab") == (2, Reason.FULL)


def test_what_is_being_loaded_is_not_evicted_though_it_was_used_first() -> None:
    cache = planner(pages=4)
    run(cache, "ab")
    run(cache, "xy")
    held = submit(cache, "ab")
    run(cache, "mn")
    assert [why(cache, letters)[0] for letters in ("ab", "xy", "mn")] == [2, 0, 2]
    assert submit(cache, "opq").store == b""  # only the two pages of "mn" could go
    load(cache, held)
    run(cache, "opq")
    assert [why(cache, letters)[0] for letters in ("ab", "mn", "opq")] == [1, 0, 3]


def test_many_clients_on_a_pool_of_one_prompt_take_turns() -> None:
    cache = planner(pages=11)
    prompts = [chr(65 + client) * 10 for client in range(12)]
    plans = [submit(cache, letters) for letters in prompts]
    assert [len(slots(plan.store)) for plan in plans] == [10] + [0] * 11
    for plan in plans:
        finish(cache, plan)
    for letters in prompts:
        run(cache, letters)
        assert why(cache, letters) == (10, Reason.FULL)
    assert cache.pages_used <= 11
    assert cache.rank_counts(0).inflight == 0


# ---- why not more ----


def test_reasons() -> None:
    cache = planner(pages=4)
    assert why(cache, "ab") == (0, Reason.NEVER_STORED)
    assert why(cache, "", tail=5) == (0, Reason.FULL)
    run(cache, "ab")
    assert why(cache, "abc") == (2, Reason.NEVER_STORED)
    assert why(cache, "ab", top=YOURS) == (0, Reason.OTHER_NAMESPACE)
    assert why(cache, "xb", top=YOURS) == (0, Reason.NEVER_STORED)
    run(cache, "vwxyz"[:4])
    assert why(cache, "ab") == (0, Reason.EVICTED)
    assert why(cache, "ab", top=YOURS) == (0, Reason.NEVER_STORED)  # it is nobody's now
    assert [str(reason) for reason in (Reason.OFF, Reason.DISABLED)] == ["off", "disabled"]


def test_a_twin_is_told_whom_to_wait_for() -> None:
    cache, told = planner(), list[str]()
    run(cache, "a")
    first = submit(cache, "abc")
    look = cache.look(MINE, ids_of("abcd"))
    assert (look.cached_tokens, look.reason) == (PAGE_TOKENS, Reason.BEING_STORED)
    assert (look.waits_for, look.twin_tokens) == (first.plan, 2 * PAGE_TOKENS)
    cache.settled(first.plan, lambda: told.append("later"))
    impatient = cache.plan(1, look, reuse=True)  # goes on without waiting: stores nothing twice
    assert (len(slots(impatient.load)), impatient.store) == (1, b"")
    assert (cache.rank_counts(1).store_skipped, cache.rank_counts(1).store_no_room) == (1, 0)
    assert told == []
    finish(cache, first)
    assert told == ["later"]
    finish(cache, impatient, rank=1)
    assert len(slots(submit(cache, "abcd").load)) == 3
    cache.settled(first.plan, lambda: told.append("at once"))
    assert told == ["later", "at once"]


@pytest.mark.parametrize("end", ["withdraw", "drop_rank", "nothing stored"])
def test_who_waits_for_a_store_that_fails_is_told_too(end: str) -> None:
    cache, told = planner(), list[bool]()
    plan = submit(cache, "abc")
    cache.settled(plan.plan, lambda: told.append(True))
    match end:
        case "withdraw":
            cache.withdraw(plan.plan)
        case "drop_rank":
            cache.drop_rank(0)
        case _:
            finish(cache, plan, pages=0)
    check_planner(cache)
    assert (told, cache.pages_used, cache.rank_counts(0).inflight) == ([True], 0, 0)


# ---- answers ----


def test_counters_say_what_happened() -> None:
    cache = planner()
    run(cache, "abc")
    plan = submit(cache, "abcd")
    assert cache.rank_counts(0).inflight == 1
    cache.loaded(0, CacheLoaded(plan.plan, device_tokens=256, host_tokens=128, deferred=True))
    cache.stored(0, CacheStored(plan.plan, 1, bytes(8)))
    counts = cache.rank_counts(0)
    assert (counts.lookups, counts.hits, counts.lookup_tokens, counts.hit_tokens) == (2, 1, 385 + 513, 384)
    assert (counts.stores, counts.pages_stored, counts.pages_loaded, counts.deferred) == (2, 4, 1, 1)
    assert (counts.inflight, counts.errors, counts.store_skipped) == (0, 0, 0)


def test_a_page_found_bad_is_not_loaded_again() -> None:
    cache = planner()
    run(cache, "abcd")
    load(cache, submit(cache, "abcd"), bad=2)
    assert cache.rank_counts(0).errors == 1
    assert why(cache, "abcd")[0] == 2
    run(cache, "abcd")
    assert why(cache, "abcd") == (4, Reason.FULL)


def test_answers_that_do_not_fit_change_nothing_for_others() -> None:
    cache = planner()
    plan = submit(cache, "abc")
    cache.stored(1, CacheStored(plan.plan, 3, bytes(24)))  # another rank's
    cache.stored(0, CacheStored(plan.plan + 1, 3, bytes(24)))
    cache.loaded(1, CacheLoaded(plan.plan))
    check_planner(cache)
    assert cache.rank_counts(0).lookups == 0
    assert why(cache, "abc") == (0, Reason.BEING_STORED)
    cache.stored(0, CacheStored(plan.plan, 4, bytes(32)))  # more than was asked for
    assert (why(cache, "abc")[0], cache.rank_counts(0).errors) == (0, 1)
    cache.stored(0, CacheStored(plan.plan, 3, bytes(24)))  # and once more
    load(cache, plan)
    load(cache, plan)
    assert (cache.pages_used, cache.rank_counts(0).inflight) == (0, 0)


def test_a_lost_rank_gives_back_what_it_held_and_nothing_else() -> None:
    cache = planner()
    run(cache, "ab")
    lost, other = submit(cache, "abc", rank=0), submit(cache, "abx", rank=1)
    cache.drop_rank(0)
    check_planner(cache)
    assert cache.rank_counts(0).inflight == 0
    finish(cache, lost)  # what it still said before it died
    finish(cache, other, rank=1)
    assert (why(cache, "abc")[0], why(cache, "abx"), cache.pages_used) == (2, (3, Reason.FULL), 3)


def test_a_reset_ends_all_chains_of_today() -> None:
    cache = planner()
    run(cache, "abc")
    open_plan = submit(cache, "abcd")
    assert cache.reset() == 0
    check_planner(cache)
    assert why(cache, "abcd") == (0, Reason.NEVER_STORED)
    finish(cache, open_plan)
    assert cache.pages_used == 0
