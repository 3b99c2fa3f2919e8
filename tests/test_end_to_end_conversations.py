"""Conversations that branch at every offset of a page: the same answers with the prefix cache, bypassed and without.

Fake engines, with states and without, and the demo model, on one rank and two, with room for everything and with so
little that pages are evicted all the time. That a wrong page is noticed is part of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import pytest

from bench.check_prefix_cache import SENTENCE
from engine.demo import demo_folder
from engine.fake_settings import ENTRY_BYTES
from engine.fake_states import STATE_BYTES
from hicache.keys import PAGE_TOKENS
from tests.branching import Comparer, Comparison, Kind, Reply, Uncached, ask
from tests.byte_tokenizer import write_model
from tests.cached_replies import cache_metric
from tests.http_calls import post
from tests.serving import RunningServer

# Ids of the fake's model: characters of ASCII, so an answer's text says exactly which tokens it had.
ASCII: Final = 128
PAGE_BYTES: Final = ENTRY_BYTES * PAGE_TOKENS  # of the fake
ENVIRONS: Final = {"pages": {}, "states": {"DEEPINFER_FAKE_STATES": "1"}}

TWO: Final = ("--dp", "2", "--routing", "least-loaded")
# One of the longest prompts and a little: most pages of a turn have to come from the host.
SMALL_DEVICE: Final = ("--num-kv-blocks", "13")
# Of pages hardly more than that, of states those of two prompts: all that is stored drives something else out.
SMALL_HOST: Final = ("--hicache-size-gb", f"{16.5 * PAGE_BYTES / 2**30:.9f}", "--hicache-state-slots", "8")

NATIVE: Final = ("--engine", "native")
DEMO_PAGE_BYTES: Final = 30 * 2 * 3 * 64 * 4 * PAGE_TOKENS
# Of a pool: those of a prompt and of another one.
FIRST_ROWS: Final = 16
# Of each number of ranks: 200 in all.
DEMO_CONVERSATIONS: Final = 100


@dataclass(frozen=True)
class Setting:
    """Flags, and the counters of the cache that must have counted."""

    flags: Sequence[str]
    counted: Sequence[str] = ()


SETTINGS: Final = {
    "one": Setting(()),
    "one, small device": Setting(SMALL_DEVICE, ["host_hits", "deferred"]),
    "one, small": Setting((*SMALL_DEVICE, *SMALL_HOST), ["host_hits", "deferred", "evicted_pages"]),
    "two": Setting(TWO, ["host_hits"]),
    "two, small device": Setting((*TWO, *SMALL_DEVICE), ["host_hits", "deferred"]),
    "two, small": Setting((*TWO, *SMALL_DEVICE, *SMALL_HOST), ["host_hits", "deferred", "evicted_pages"]),
    "two, by affinity": Setting(("--dp", "2")),
}

# Prompts of up to six pages; a device that holds one of them, and a host pool of some.
DEMO_DEVICE: Final = ("--num-kv-blocks", "7")
DEMO: Final = {
    1: Setting(
        (*DEMO_DEVICE, "--hicache-size-gb", f"{20.5 * DEMO_PAGE_BYTES / 2**30:.3f}"), ["host_hits", "evicted_pages"]
    ),
    2: Setting((*TWO, *DEMO_DEVICE, "--hicache-size-gb", "1"), ["host_hits"]),
}


@dataclass
class Plain:
    """A server without a cache, and the answers it gave."""

    server: RunningServer
    known: dict[bytes, Reply] = field(default_factory=dict)


async def characters(text: str) -> list[int]:
    return list(text.encode("ascii"))


FAKE: Final = Kind(range(ASCII), opening=(260, 700), added=(1, 300), answer=24, longest=1100, tokenize=characters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("conversations") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": ASCII}))
    return folder


@pytest.fixture(scope="module", params=ENVIRONS)
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    return ENVIRONS[request.param]


@pytest.fixture(scope="module")
def plain(model: Path, environ: dict[str, str]) -> Iterator[Plain]:
    with RunningServer(model, "--hicache-size-gb", "0", environ=environ) as server:
        yield Plain(server)


@asynccontextmanager
async def comparer(server: RunningServer, plain: Plain, kind: Kind) -> AsyncIterator[Comparer]:
    async with aiohttp.ClientSession(server.address) as client, aiohttp.ClientSession(plain.server.address) as other:
        yield Comparer(client, Uncached(other, plain.known), kind)


def check(server: RunningServer, found: Comparison, counted: Sequence[str]) -> None:
    """All answers were the same, in a run in which what had to happen did, and nothing is held in the end."""
    server.wait_idle()
    assert not found.different, found.different[:3]
    assert found.offsets == set(range(PAGE_TOKENS))
    for name in ("device_hits", *counted):
        assert cache_metric(server, f"{name}_total") > 0, name
    assert cache_metric(server, "faults_total") == 0
    assert cache_metric(server, "pages_used") <= cache_metric(server, "pages_total")


async def hold(
    model: Path, setting: Setting, plain: Plain, environ: dict[str, str], *, count: int, branches: int
) -> Comparison:
    # Requests must overlap if one is to wait for the blocks of another; at full speed that is left to chance.
    pace = {"DEEPINFER_FAKE_STEP_MS": "1"} if "deferred" in setting.counted else {}
    with RunningServer(model, *setting.flags, environ=environ | pace) as server:
        async with comparer(server, plain, FAKE) as comparing:
            found = await comparing.hold(range(count), branches, clients=6)
        counted = (*setting.counted, "states_loaded") if environ and "host_hits" in setting.counted else setting.counted
        check(server, found, counted)
    assert not found.ties, "a fake is always certain"
    return found


@pytest.mark.parametrize("setting", ["one, small", "two, small device"])
async def test_a_fake_answers_the_same(model: Path, plain: Plain, environ: dict[str, str], setting: str) -> None:
    await hold(model, SETTINGS[setting], plain, environ, count=16, branches=8)


@pytest.mark.soak
@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_fake_answers_the_same_for_long(
    model: Path, plain: Plain, environ: dict[str, str], setting: str
) -> None:
    found = await hold(model, SETTINGS[setting], plain, environ, count=200, branches=4)
    if SMALL_HOST[0] not in SETTINGS[setting].flags:
        assert found.generated > 0, "pages of answers are reused too"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_demo_model_answers_the_same(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder, setting = demo_folder(), DEMO[ranks]
    without = RunningServer(folder, *NATIVE, "--hicache-size-gb", "0")
    with RunningServer(folder, *NATIVE, *setting.flags) as server, without:
        async with comparer(server, Plain(without), await demo_kind(without)) as comparing:
            found = await comparing.hold(range(DEMO_CONVERSATIONS), 2, clients=4)
            check(server, found, setting.counted)
            with capsys.disabled():
                print(f"\ndemo model, {ranks} ranks: {found.turns} turns, {found.cached} tokens cached")
                print(f"answers that part between equally likely tokens: {found.ties}")


async def demo_kind(server: RunningServer) -> Kind:
    async def tokenize(text: str) -> list[int]:
        async with aiohttp.ClientSession(server.address) as client:
            told = await post(client, "/tokenize", prompt=text, add_special_tokens=False)
        ids: list[int] = told["tokens"]
        return ids

    words = await tokenize(SENTENCE)
    return Kind(words, opening=(130, 400), added=(1, 120), answer=6, longest=560, tokenize=tokenize)


async def test_a_wrong_page_or_state_is_noticed(model: Path, plain: Plain, environ: dict[str, str]) -> None:
    wrong = ("states", STATE_BYTES) if environ else ("pages", PAGE_BYTES)
    with RunningServer(model, *SMALL_DEVICE, environ=environ) as server:
        async with comparer(server, plain, FAKE) as comparing:
            await plant_a_wrong_page(server, comparing, SMALL_DEVICE, wrong)
    assert len(comparing.found.different) == 1


@pytest.mark.soak
async def test_a_wrong_page_of_the_demo_model_is_noticed() -> None:
    flags = (*NATIVE, *DEMO_DEVICE, "--hicache-size-gb", "0.3")
    with RunningServer(demo_folder(), *flags) as server:
        async with comparer(server, Plain(server), await demo_kind(server)) as comparing:
            await plant_a_wrong_page(server, comparing, DEMO_DEVICE, ("pages", DEMO_PAGE_BYTES))
    assert len(comparing.found.different) == 1


async def plant_a_wrong_page(
    server: RunningServer, comparing: Comparer, device: Sequence[str], wrong: tuple[str, int]
) -> None:
    """Have a prompt stored and driven off the device, spoil the host pool, and compare what is answered then."""
    kind, draw = comparing.kind, random.Random(0)
    ids, filler = (draw.choices(kind.vocabulary, k=int(device[-1]) * PAGE_TOKENS - kind.answer) for _ in range(2))
    ids = ids[: 5 * PAGE_TOKENS + 100]
    async with aiohttp.ClientSession(server.address) as client:
        before = await ask(client, ids, kind.answer)
        server.wait_idle()
        await ask(client, filler, kind.answer)
        server.wait_idle()
        spoil(server, *wrong)
        # Before the check in the background finds it: that looks at some pages a second.
        after = await ask(client, ids, kind.answer)
    assert after.cached >= 4 * PAGE_TOKENS
    comparing.judge("planted", after, before)


def spoil(server: RunningServer, what: str, size: int) -> None:
    """Give the rows of the host pool that are used first the content of one another."""
    files = Path(f"/proc/{server.pid}/fd").iterdir()
    pool = next(file for file in files if str(file.readlink()).startswith(f"/memfd:deepinfer-{what}"))
    with pool.open("r+b", buffering=0) as file:
        rows = np.memmap(file, np.uint8).reshape(-1, size)
        rows[:FIRST_ROWS] = np.roll(rows[:FIRST_ROWS], 1, axis=0)
