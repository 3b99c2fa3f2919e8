"""A wrong backend is found out by probes, or in the background while it serves, and nothing wrong leaves after that."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from server.tokenizer.backend import Backend, CacheCounts, HfBackend, Ids
from server.tokenizer.choose import MAKERS, choose
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import BackendRefusedError
from server.tokenizer.load import TextTokenizer
from server.tokenizer.verify import MAX_WAITING
from tests.tokenizer_kinds import DEPENDENT, loaded, plain
from tests.tokenizer_texts import corpus, hard_texts

RARE = "zyzzyva"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return loaded(plain(), tmp_path_factory.mktemp("plain"))


class Wrong:
    """Right but for texts with a certain word, of which it drops the last id."""

    name = "wrong"
    inline_characters = 1000

    def __init__(self, tokenizer: TextTokenizer, word: str = RARE) -> None:
        self._right = HfBackend(tokenizer.backend)
        self._word = word

    def encode(self, text: str) -> Ids:
        found = self._right.encode(text)
        return found[:-1] if self._word in text else found

    def counts(self) -> CacheCounts:
        return CacheCounts()


class Lenient(Wrong):
    """Takes text that is not valid Unicode."""

    def encode(self, text: str) -> Ids:
        return super().encode(text.encode("utf-8", "replace").decode())


# ---- probes ----


@pytest.mark.parametrize("word", ["<|im_end|><|im_end|>", "in<|x|>side", "👍🏽", "\r\n", "\x1b", "12345", "    "])
def test_a_broken_backend_is_caught_by_probes(tokenizer: TextTokenizer, word: str) -> None:
    makers = {"wrong": lambda tokenizer: Wrong(tokenizer, word), "hf": MAKERS["hf"]}
    choice = choose(tokenizer, makers=makers)
    assert choice.backend.name == "hf"
    assert "wrong: " in choice.reason
    with pytest.raises(BackendRefusedError, match=r"it gives \[.*tokenizer.encode \["):
        choose(tokenizer, "wrong", makers)


def test_invalid_unicode_must_be_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(BackendRefusedError, match="not valid Unicode"):
        choose(tokenizer, "wrong", {"wrong": lambda tokenizer: Lenient(tokenizer, "never")})


def test_the_fastest_that_fits_is_taken(tokenizer: TextTokenizer) -> None:
    assert [choose(tokenizer, name).backend.name for name in ("auto", *MAKERS)] == [
        "fastokens", "fastokens", "segment", "hf",
    ]  # fmt: skip


def test_without_fastokens_auto_takes_segment(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    choice = choose(tokenizer)
    assert choice.backend.name == "segment"
    assert "fastokens is not installed" in choice.reason
    with pytest.raises(BackendRefusedError, match="fastokens is not installed"):
        choose(tokenizer, "fastokens")


@pytest.mark.parametrize("name", ["single_word", "strip beside space"])
def test_where_pieces_depend_on_each_other_segment_is_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make, reason = DEPENDENT[name]
    with pytest.raises(BackendRefusedError, match=reason):
        choose(loaded(make(), tmp_path_factory.mktemp("dependent")), "segment")


# ---- in the background ----


@pytest.fixture
def watched(tokenizer: TextTokenizer) -> Iterator[Encoder]:
    encoder = Encoder(tokenizer, Wrong(tokenizer), verify_rate=1.0)
    yield encoder
    encoder.close()


def test_right_ids_are_only_counted(watched: Encoder) -> None:
    watched.encode("hello", True)
    watched.encode("hello", False)
    watched.verifier.wait()
    checks = watched.verifier.checks
    assert (checks.done, checks.mismatches, checks.switches, watched.backend.name) == (2, 0, 0, "wrong")


async def test_under_load_nothing_wrong_leaves_after_the_switch(tokenizer: TextTokenizer) -> None:
    """Prompts stream in while one after the other has the word; the answers from the switch on are all right."""
    encoder = Encoder(tokenizer, Wrong(tokenizer), verify_rate=1.0)
    reference = HfBackend(tokenizer.backend)
    texts = [text + (RARE if at % 3 == 2 else "") + corpus()[:1500] for at, text in enumerate(hard_texts(7, 90, []))]
    right_after: list[bool] = []

    async def one(text: str) -> None:
        switched = encoder.verifier.checks.switches > 0
        ids = await encoder.encode_async(text, False)
        if switched:
            right_after.append(np.array_equal(ids, reference.encode(text)))

    for at in range(0, len(texts), 6):
        await asyncio.gather(*(one(text) for text in texts[at : at + 6]))
        await asyncio.to_thread(encoder.verifier.wait)
    assert encoder.backend.name == "hf"
    assert encoder.verifier.checks.switches == 1
    assert len(right_after) > 20
    assert all(right_after)
    encoder.close()


def test_what_a_switch_overtakes_is_encoded_again(tokenizer: TextTokenizer) -> None:
    """A prompt is in the wrong backend's hands while another one convicts it."""
    held, entered = threading.Event(), threading.Event()

    class Slow(Wrong):
        def encode(self, text: str) -> Ids:
            found = super().encode(text)
            if text.startswith("slow"):
                entered.set()
                assert held.wait(30)
            return found

    encoder = Encoder(tokenizer, Slow(tokenizer), verify_rate=1.0)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(encoder.encode(f"slow {RARE}", False).tolist()))
    thread.start()
    assert entered.wait(30)
    encoder.encode(RARE, False)
    encoder.verifier.wait()
    assert encoder.backend.name == "hf"
    held.set()
    thread.join()
    assert found == [HfBackend(tokenizer.backend).encode(f"slow {RARE}").tolist()]
    encoder.close()


def test_what_a_wrong_backend_left_in_the_cache_is_gone(watched: Encoder, tokenizer: TextTokenizer) -> None:
    text = f"{RARE}<|im_end|>" + corpus()[:4000] + "<|im_end|>" + "x" * 300
    wrong = watched.encode(text, False)
    watched.verifier.wait()
    right = HfBackend(tokenizer.backend).encode(text)
    assert not np.array_equal(wrong, right)
    assert np.array_equal(watched.encode(text, False), right)


@pytest.mark.parametrize("log_prompts", [True, False])
def test_the_smallest_piece_is_logged_only_if_prompts_may_be(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    encoder = Encoder(tokenizer, Wrong(tokenizer), verify_rate=1.0, log_prompts=log_prompts)
    with caplog.at_level(logging.INFO):
        encoder.encode(f"secret words <|im_end|> more {corpus()[:500]}{RARE}{corpus()[500:900]} and <tool> on", False)
        encoder.verifier.wait()
    encoder.close()
    assert f"smallest part found that differs has {len(RARE)} characters" in caplog.text
    assert (repr(RARE) in caplog.text) is log_prompts
    assert "secret" not in caplog.text


def test_a_full_queue_skips_the_check(tokenizer: TextTokenizer) -> None:
    held = threading.Event()

    class Stuck(HfBackend):
        def encode(self, text: str) -> Ids:
            assert held.wait(30)
            return super().encode(text)

    encoder = Encoder(tokenizer, Wrong(tokenizer), verify_rate=1.0)
    encoder.verifier._reference = Stuck(tokenizer.backend)
    for number in range(MAX_WAITING + 5):
        encoder.encode(f"text {number}", False)
    assert encoder.verifier.checks.skipped >= 4
    held.set()
    encoder.verifier.wait()
    assert encoder.verifier.checks.done + encoder.verifier.checks.skipped == MAX_WAITING + 5
    encoder.close()


def test_a_rate_of_none_checks_nothing_and_hf_is_never_checked(tokenizer: TextTokenizer) -> None:
    backends: list[tuple[Backend | None, float]] = [(Wrong(tokenizer), 0.0), (None, 1.0)]
    for backend, rate in backends:
        encoder = Encoder(tokenizer, backend, verify_rate=rate)
        encoder.encode(RARE, False)
        encoder.verifier.wait()
        assert encoder.verifier.checks.done == 0
        encoder.close()


def test_a_sample_that_cannot_be_checked_ends_nothing(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder(tokenizer, Wrong(tokenizer), verify_rate=1.0)
    encoder.verifier.offer(encoder.backend, "\ud800", np.empty(0, np.int32), None)
    encoder.encode("fine", False)
    encoder.verifier.wait()
    assert "could not be checked" in caplog.text
    assert encoder.verifier.checks.done == 1
    encoder.close()
