"""Every backend that passes its probes equals `tokenizer.encode` on tokenizers of real models, over many texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.demo import demo_folder
from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, HfBackend
from server.tokenizer.choose import MAKERS, choose
from server.tokenizer.detok import Detokenizer
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import BackendRefusedError, TokenizerLoadError
from server.tokenizer.load import TextTokenizer, load
from tests.tokenizer_texts import corpus, deepseek_folder, hard_texts, zoo_folders

TEXTS = 10_000
FEW = 300
# Cut and joined again, the texts of so many make one prompt that is long enough for the cache of prefixes.
JOINED = 40


def proven(tokenizer: TextTokenizer, count: int) -> dict[str, str]:
    """Backend -> why it was refused, or "" for one that equalled the reference on all texts."""
    found = {}
    for name in ("fastokens", "segment"):
        try:
            backend = choose(tokenizer, name).backend
        except BackendRefusedError as error:
            found[name] = str(error)
            continue
        assert_equal(tokenizer, backend, count)
        assert_prompts_equal(tokenizer, backend, count // JOINED)
        found[name] = ""
    return found


def assert_equal(tokenizer: TextTokenizer, backend: Backend, count: int) -> None:
    reference = HfBackend(tokenizer.backend)
    spellings = [token.content for token in AddedTokens(tokenizer.backend).by_id.values()]
    for text in hard_texts(1, count, spellings):
        assert np.array_equal(backend.encode(text), reference.encode(text)), repr(text)


def assert_prompts_equal(tokenizer: TextTokenizer, backend: Backend, count: int) -> None:
    """A prompt that grows, as a conversation does, through the encoder with its cache of prefixes."""
    reference = HfBackend(tokenizer.backend)
    encoder = Encoder(tokenizer, backend)
    spellings = [token.content for token in encoder._added.by_id.values()]
    texts = list(hard_texts(2, count * JOINED, spellings))
    for first in range(0, len(texts), JOINED):
        prompt = ""
        for at in range(first, first + JOINED, 8):
            prompt += "".join(texts[at : at + 8]) + corpus()[at : at + 400]
            assert np.array_equal(encoder.encode(prompt, False), reference.encode(prompt)), repr(prompt)
    if encoder.controls.can_tell and count:
        assert encoder.prefix_counts().hits > 0
    encoder.close()


def assert_streams_join(tokenizer: TextTokenizer, count: int) -> None:
    """Deltas of ids, one by one and all at once, join to the one-shot decode."""
    reference = HfBackend(tokenizer.backend)
    for text in hard_texts(3, count, [token.content for token in AddedTokens(tokenizer.backend).by_id.values()]):
        ids = reference.encode(text).tolist()
        for cut in {0, len(ids) // 3}:
            stream = Detokenizer(tokenizer.pieces)
            deltas = [stream.push([token]) for token in ids[cut:]]
            assert "".join(deltas) + stream.flush() == tokenizer.decode(ids[cut:]), repr(text)


@pytest.mark.parametrize("folder", [demo_folder, deepseek_folder], ids=["demo", "deepseek"])
def test_backends_equal_the_reference_on_hard_texts(folder: object) -> None:
    assert callable(folder)
    tokenizer = load(folder())
    assert proven(tokenizer, FEW) == {"fastokens": "", "segment": ""}
    assert_streams_join(tokenizer, FEW)


@pytest.mark.soak
def test_every_tokenizer_of_the_zoo_is_proven_or_refused() -> None:
    for folder in [*zoo_folders(), deepseek_folder(), Path(demo_folder())]:
        try:
            tokenizer = load(folder)
        except TokenizerLoadError as error:
            print(f"{folder.name}: not loaded: {error}")
            continue
        refused = {name: why for name, why in proven(tokenizer, TEXTS).items() if why}
        assert_streams_join(tokenizer, TEXTS // 10)
        print(f"{folder.name}: {choose(tokenizer).backend.name}, refused: {refused}")
        assert set(refused) < set(MAKERS)
