"""How long the host prefix cache holds the event loop for one request, with a full index of a million pages.

cold: a prompt that nobody had before; as many pages have to go as it has.
next turn: a prompt that was stored, and some tokens more; with the conversation known by its hint, and without.
Look and plan are what a request waits for; the answers (loaded and stored) come while it runs. `gc` is one full
garbage collection with that index alive: it stops the loop whenever the interpreter pleases.
The rival is `bench/cache_naive.py`, one page after the other in Python, in turns with ours. The share is of 278 ms,
what encoding such a prompt took an earlier server. Every result is checked; fixed seed; medians. `cpu` is the
processor time of look and plan, which neighbours on a busy machine change least.
Ceiling: hashing 150,000 tokens and comparing them with what is kept, each from the processor's cache, is about 0.1 ms.

    python -m bench.cache [--pages N] [--tokens N] [--turn N] [--rounds N]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from bench.cache_naive import NaiveIndex
from bench.report import Row, report
from hicache.keys import KEY_BYTES, PAGE_TOKENS, root
from hicache.pages import Ids
from hicache.plan import Planner, Rules
from hicache.shape import PoolShape
from ipc.messages import CacheLoaded, CacheStored

EARLIER_MS: Final = 278.0
ROOT: Final = root(b"bench")
RULES: Final = Rules(keep_tokens=1, first_state=0, state_window=0, has_states=False)
SUM_BYTES: Final = 8
SLOT_BYTES: Final = 4

Times = tuple[float, float, float, float]  # look, plan, answers, and processor time of the first two; milliseconds
Request = Callable[[Ids, bytes, int], Times]


def clock(work: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    before = time.perf_counter()
    work()
    return (time.perf_counter() - before) * 1000


def in_ms(look: float, plan: float, answers: float, used: float) -> Times:
    """Seconds as milliseconds."""
    return look * 1000, plan * 1000, answers * 1000, used * 1000


class Ours:
    """One request after the other on a planner."""

    def __init__(self, pages: int) -> None:
        self._planner = Planner(PoolShape(pages, 4096, 0, 0), RULES)

    def request(self, ids: Ids, hint: bytes, cached: int) -> Times:
        """Look, plan, and a rank's answers; `cached` tokens must be found."""
        start, cpu = time.perf_counter(), time.thread_time()
        look = self._planner.look(ROOT, ids, hint)
        looked = time.perf_counter()
        plan = self._planner.plan(0, look, reuse=True)
        planned, used = time.perf_counter(), time.thread_time() - cpu
        stored = len(plan.store) // SLOT_BYTES
        self._planner.loaded(0, CacheLoaded(plan.plan, host_tokens=look.cached_tokens))
        self._planner.stored(0, CacheStored(plan.plan, stored, bytes(SUM_BYTES * stored)))
        done = time.perf_counter()
        assert look.cached_tokens == cached
        assert stored == len(plan.keys) // KEY_BYTES - cached // PAGE_TOKENS
        return in_ms(looked - start, planned - looked, done - planned, used)


class Naive:
    """The same on the rival."""

    def __init__(self, pages: int) -> None:
        self._index = NaiveIndex(pages)

    def request(self, ids: Ids, hint: bytes, cached: int) -> Times:
        """See `Ours.request`; it has no use for a hint."""
        del hint
        start, cpu = time.perf_counter(), time.thread_time()
        keys, pages, found = self._index.look(ROOT, ids)
        looked = time.perf_counter()
        plan = self._index.plan(ROOT, keys, pages, found)
        planned, used = time.perf_counter(), time.thread_time() - cpu
        self._index.done(plan)
        done = time.perf_counter()
        assert found == cached // PAGE_TOKENS
        return in_ms(looked - start, planned - looked, done - planned, used)


def measure(request: Request, args: argparse.Namespace) -> Iterator[tuple[str, list[Times]]]:
    """Fill the index, then the cases in turn."""
    rng = np.random.default_rng(1)

    def fresh(count: int) -> Ids:
        return rng.integers(0, 150_000, count, np.int32)

    for _ in range(args.pages * PAGE_TOKENS // args.tokens + 1):
        request(fresh(args.tokens), b"", 0)
    prompts = [fresh(args.tokens) for _ in range(args.rounds)]
    cases: dict[str, list[Times]] = {"cold": [], "next turn": [], "next turn, no hint": []}
    for number, prompt in enumerate(prompts):
        cases["cold"].append(request(prompt, b"%d" % number, 0))
    for case, named in (("next turn", True), ("next turn, no hint", False)):
        for number, prompt in enumerate(prompts):
            longer = np.concatenate([prompt, fresh(args.turn)])
            cached = len(prompt) // PAGE_TOKENS * PAGE_TOKENS
            cases[case].append(request(longer, b"%d" % number if named else b"", cached))
            prompts[number] = longer
    yield from cases.items()


def rows(way: str, request: Request, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a case."""
    measured = list(measure(request, args))
    collected = statistics.median(clock(gc.collect) for _ in range(3))
    for case, times in measured:
        look, plan, answers, used = (statistics.median(column) for column in zip(*times, strict=True))
        together = [some[0] + some[1] for some in times]
        yield {
            "way": way,
            "case": case,
            "look ms": look,
            "plan ms": plan,
            "look+plan ms": statistics.median(together),
            "best ms": min(together),
            "cpu ms": used,
            "share of 278 ms": f"{statistics.median(together) / EARLIER_MS:.2%}",
            "answers ms": answers,
            "gc ms": collected,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache", description="Look-ups and plans of the prefix cache."
    )
    parser.add_argument("--pages", type=int, default=1_000_000, help="pages in the index (%(default)s)")
    parser.add_argument("--tokens", type=int, default=150_000, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--turn", type=int, default=2_000, help="tokens of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="conversations (%(default)s)")
    args = parser.parse_args(argv)
    if min(args.turn, args.rounds) < 1 or args.tokens < PAGE_TOKENS:
        parser.error("--turn and --rounds are above 0, --tokens at least one page")
    if args.pages * PAGE_TOKENS < args.rounds * (args.tokens + 2 * args.turn):
        parser.error("--pages must hold all conversations")
    found: list[Row] = [
        *rows("planner", Ours(args.pages).request, args),
        *rows("naive", Naive(args.pages).request, args),
    ]
    report("cache", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
