"""Model folder -> tokenizer: chat templates, decoding, refusals, and no torch in the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.demo import demo_folder
from server.tokenizer.errors import ChatTemplateError, TokenizerLoadError
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import EOS, IM_END, VOCAB_SIZE, write_model

USER = {"role": "user", "content": "hi"}
USES_ALL = """
import sys
if sys.argv[2] == "hidden":
    sys.modules["torch"] = None
from pathlib import Path
from server.tokenizer.detok import Detokenizer
from server.tokenizer.encode import Encoder
from server.tokenizer.load import load
tokenizer = load(Path(sys.argv[1]))
text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
ids = Encoder(tokenizer).encode(text, True).tolist()
stream = Detokenizer(tokenizer.pieces, skip_special=False)
assert stream.push(ids) + stream.flush() == tokenizer.decode(ids, skip_special=False)
print([name for name, module in sys.modules.items() if module and name.split(".")[0] in {"torch", "engine", "aiohttp"}])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def tokenizer(folder: Path) -> TextTokenizer:
    return load(folder)


def _change_config(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("torch", ["installed", "hidden"])
def test_torch_is_never_loaded_and_nothing_is_said(folder: Path, torch: str) -> None:
    _change_config(folder, tokenizer_class="LlamaTokenizerFast")
    command = [sys.executable, "-W", "error", "-c", USES_ALL, str(folder), torch]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_conversation_is_rendered(tokenizer: TextTokenizer) -> None:
    assert tokenizer.render_chat([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_template_of_its_own_file_and_variables(folder: Path) -> None:
    _change_config(folder, chat_template=None)
    assert not load(folder).has_chat_template
    (folder / "chat_template.jinja").write_text(
        "{{ mood }} {{ tools | length }} {{ messages[0].content }}{{ eos_token }}"
    )
    tokenizer = load(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat([USER], mood="calm", tools=[{"type": "function"}]) == "calm 1 hi<|eos|>"


def test_folder_without_template_says_so(folder: Path) -> None:
    _change_config(folder, chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load(folder).render_chat([USER])


def test_words_of_raise_exception_reach_the_client(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="unknown role pirate"):
        tokenizer.render_chat([{"role": "pirate", "content": "arr"}])


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": ["parts"]}]],
)
def test_messages_the_demo_template_cannot_take_are_the_clients_fault(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        load(demo_folder()).render_chat(messages)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors", "continue_final_message"])
def test_variables_cannot_steer_the_call(tokenizer: TextTokenizer, name: str) -> None:
    variables: dict[str, Any] = {name: "{{ 1 }}"}
    with pytest.raises(ChatTemplateError, match=name):
        tokenizer.render_chat([USER], **variables)


def test_messages_are_left_as_they_were(tokenizer: TextTokenizer) -> None:
    messages = [dict(USER, extra={"deep": [1]})]
    tokenizer.render_chat(messages)
    assert messages == [dict(USER, extra={"deep": [1]})]


def test_decode_skips_special_and_unknown_ids(tokenizer: TextTokenizer) -> None:
    ids = [*"é".encode(), EOS, -1, VOCAB_SIZE, 2**40]
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special=False) == "é<|eos|>"


def test_tokens_of_logprobs(tokenizer: TextTokenizer) -> None:
    assert (tokenizer.token_text(IM_END), tokenizer.token_bytes(IM_END)) == ("<|im_end|>", b"<|im_end|>")
    assert (tokenizer.token_text(0xC3), tokenizer.token_bytes(0xC3)) == ("\N{REPLACEMENT CHARACTER}", b"\xc3")


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=rf"{tmp_path}: no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0", "model": {"type": "New"}}'])
def test_broken_file_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: cannot be loaded"):
        load(folder)


def test_decoder_that_cannot_be_streamed_names_the_file(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    file.write_text(json.dumps(content))
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: a decoder step of type WordPiece"):
        load(folder)
