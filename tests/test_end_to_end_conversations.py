"""Conversations that branch at every offset of a page: the same answers with the prefix cache, bypassed and without.

Fake engines, with states and without, and the demo model, on one rank and two, with room for everything and with so
little that pages are evicted all the time. That a wrong page is noticed is part of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from engine.demo import demo_folder
from hicache.keys import PAGE_TOKENS
from tests.branching import Comparer, Comparison, Kind, Uncached
from tests.byte_tokenizer import write_model
from tests.serving import RunningServer

FAKE_PAGE_GB: Final = 8 * PAGE_TOKENS / 2**30
# Ids of the fake's model: characters of ASCII, so an answer's text says exactly which tokens it had.
ASCII: Final = 128
STATES: Final = {"DEEPINFER_FAKE_STATES": "1"}
TWO: Final = ("--dp", "2", "--routing", "least-loaded")
# Of the fakes: blocks for two of the longest prompts, so that most pages have to come from the host; and a host that
# holds hardly more than one.
SMALL_DEVICE: Final = ("--num-kv-blocks", "36")
SMALL_HOST: Final = ("--hicache-size-gb", f"{24.5 * FAKE_PAGE_GB:.9f}", "--hicache-state-slots", "8")


async def characters(text: str) -> list[int]:
    return list(text.encode("ascii"))


FAKE: Final = Kind(range(ASCII), opening=(260, 700), added=(1, 400), answer=40, longest=1700, tokenize=characters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("conversations") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": ASCII}))
    return folder


@contextmanager
def both(model: Path, flags: Sequence[str], environ: dict[str, str]) -> Iterator[tuple[RunningServer, RunningServer]]:
    """A server with the cache, and one without."""
    cached = RunningServer(model, *flags, environ=environ)
    with RunningServer(model, "--hicache-size-gb", "0", environ=environ) as uncached, cached:
        yield cached, uncached


@asynccontextmanager
async def comparer(cached: RunningServer, uncached: RunningServer, kind: Kind) -> AsyncIterator[Comparer]:
    async with aiohttp.ClientSession(cached.address) as one, aiohttp.ClientSession(uncached.address) as other:
        yield Comparer(one, Uncached(other), kind)


def check(found: Comparison) -> None:
    assert not found.different, found.different[:3]
    assert found.cached > 0
    assert len(found.offsets) == PAGE_TOKENS


async def hold(model: Path, flags: Sequence[str], environ: dict[str, str], count: int, branches: int) -> Comparison:
    with both(model, flags, environ) as (cached, uncached):
        async with comparer(cached, uncached, FAKE) as comparing:
            found = await comparing.hold(range(count), branches, clients=6)
        cached.wait_idle()
        check(found)
        assert not found.ties, "the fake is always certain"
        print(found.turns, found.cached, found.generated, [ (n, cached.metric(n, "deepinfer_hicache")) for n in ("device_hits_total","host_hits_total","evicted_pages_total","evicted_states_total","states_loaded_total","deferred_total","store_skipped_total","twins_waited_total","errors_total","faults_total")])
    return found


@pytest.mark.parametrize("environ", [{}, STATES], ids=["pages", "states"])
@pytest.mark.parametrize("flags", [SMALL_DEVICE, (*SMALL_DEVICE, *SMALL_HOST), TWO, (*TWO, *SMALL_DEVICE), (*TWO, *SMALL_DEVICE, *SMALL_HOST)])
async def test_fakes(model, flags, environ):
    await hold(model, flags, environ, 16, 8)
