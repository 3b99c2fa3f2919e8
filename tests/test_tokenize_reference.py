"""Reference encoders: the model folder's own and DeepSeek's package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from deepseek_recipe import ChatCompletionRequest, DeepseekV4Encoding, Tokenizer
from hypothesis import given
from hypothesis import strategies as st

from server.tokenizer.encode import Encoder
from server.tokenizer.errors import ReferenceRejectedError, TokenizerLoadError
from server.tokenizer.load import load
from server.tokenizer.reference import FolderEncoder, Recipe, between, reference_encoder
from server.tokenizer.typed import Prompt
from tests.tokenizer_texts import deepseek_folder

USER = {"role": "user", "content": "hi"}
CODE = """
def encode_messages(messages, thinking_mode):
    if messages[0]["content"] == "number":
        return 5
    messages[0]["seen"] = True
    return thinking_mode + "|" + "|".join(message["role"] + ":" + message["content"] for message in messages)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(CODE)
    return tmp_path


def _config(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_the_folders_own_comes_first(folder: Path) -> None:
    encoder = reference_encoder(_config(folder, "deepseek_v4"), "thinking")
    assert isinstance(encoder, FolderEncoder)
    assert encoder.write([USER]) == ("thinking|user:hi", None)
    assert "seen" not in USER


def test_what_it_raises_or_gives_instead_of_text_is_a_rejection(folder: Path) -> None:
    encoder = reference_encoder(folder, "chat")
    assert encoder is not None
    with pytest.raises(ReferenceRejectedError, match=r"encoding\.py: IndexError"):
        encoder.write([])
    with pytest.raises(ReferenceRejectedError, match="gave int, not text"):
        encoder.write([{"role": "user", "content": "number"}])


@pytest.mark.parametrize(
    ("code", "why"), [("import nothing_such", "cannot be run: ModuleNotFound"), ("", "no function")]
)
def test_a_file_that_cannot_serve_is_named(folder: Path, code: str, why: str) -> None:
    file = folder / "encoding" / "encoding.py"
    file.write_text(code)
    with pytest.raises(TokenizerLoadError, match=rf"{file}: .*{why}"):
        reference_encoder(folder, "chat")


@pytest.mark.parametrize("content", ['{"model_type": "llama"}', "[]", "{", None])
def test_other_models_have_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert reference_encoder(tmp_path, "chat") is None


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(TokenizerLoadError, match="package deepseek-recipe, which is not installed"):
        reference_encoder(_config(tmp_path, "deepseek_v4"), "chat")


@pytest.mark.parametrize(("model_type", "opens"), [("deepseek_v4", "be good"), ("deepseek_v41", "<｜System｜>be good")])
def test_deepseeks_package_writes_its_models(tmp_path: Path, model_type: str, opens: str) -> None:
    encoder = reference_encoder(_config(tmp_path, model_type), "chat")
    assert isinstance(encoder, Recipe)
    written = encoder.write([{"role": "system", "content": "be good"}, {"role": "user", "content": "<｜User｜>"}])
    assert written.text == f"<｜begin▁of▁sentence｜>{opens}<｜User｜><｜User｜><｜Assistant｜></think>"
    assert written.special is not None
    assert [written.text[low:high] for low, high in written.special].count("<｜User｜>") == 1
    with pytest.raises(ReferenceRejectedError, match="tool_call_id"):
        encoder.write([{"role": "tool", "content": "x"}])


texts = st.lists(
    st.sampled_from(["<think>", "<｜User｜>", "</think>", "<｜end▁of▁sentence｜>", "a ", "\n", "é"]), max_size=6
)


@pytest.fixture(scope="module")
def deepseek() -> Encoder:
    return Encoder(load(deepseek_folder()), every_control=True)


@pytest.fixture(scope="module")
def recipe_encoding() -> DeepseekV4Encoding:
    return DeepseekV4Encoding().with_tokenizer(Tokenizer.from_file(str(deepseek_folder() / "tokenizer.json")))


@given(parts=texts)
def test_ids_are_those_of_the_packages_own_encoding(
    deepseek: Encoder, recipe_encoding: DeepseekV4Encoding, parts: list[str]
) -> None:
    recipe = Recipe("DeepSeek-V4-Pro", "chat")
    messages = [{"role": "user", "content": "x" + "".join(parts)}]
    written = recipe.write(messages)
    assert written.special is not None
    prompt = Prompt(written.text, between(written.special, len(written.text)))
    body = json.dumps({"model": "DeepSeek-V4-Pro", "messages": messages})
    conversation = ChatCompletionRequest(body).convert(recipe._options).conversation
    expected = recipe_encoding.encode(conversation)
    assert np.array_equal(deepseek.encode_prompt(prompt, add_special_tokens=False), expected)


def test_the_rest_lies_between() -> None:
    assert between((), 3) == ((0, 3),)
    assert between(((0, 2), (2, 3), (5, 6)), 6) == ((3, 5),)
