"""Small tokenizers made in tests: with merges and all flags of added tokens, and one for each reason to refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from server.tokenizer.load import TextTokenizer, load
from tests.tokenizer_texts import corpus

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([corpus()[:60_000]], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def plain() -> Tokenizer:
    """Byte-level BPE with merges; special tokens, ordinary ones, and some that are others' beginnings or overlap."""
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens(
        [special(text) for text in ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|im_", "<|x|>")]
    )
    tokenizer.add_tokens([added(text) for text in ("<tool>", "<tool>s", "ol>", "\n\n", "\n\n\n", "  ")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"special": True, "normalized": False, **flags})


def added(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"special": False, "normalized": False, **flags})


def _with(change: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([special("<|im_start|>"), special("<|im_end|>")])
    change(tokenizer)
    return tokenizer


def _set(name: str, value: Any) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(tokenizer, name, value)


def _strips(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([special("<l>", lstrip=True), special("<r>", rstrip=True)])
    tokenizer.add_special_tokens([special("<lr>", lstrip=True, rstrip=True)])


def _normalized(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_tokens([added("<Word>", normalized=True), added("é!", normalized=True), added("<Raw>")])


def _two_looks(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([added("<User>", normalized=True), added("<Us"), added("er><", normalized=True)])


def _prepends(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


# What `segment` must accept.
INDEPENDENT: Final[dict[str, Callable[[], Tokenizer]]] = {
    "plain": plain,
    "strips": lambda: _with(_strips),
    "normalized": lambda: _with(_normalized),
    "two looks": lambda: _with(_two_looks),
    "prepends": lambda: _with(_prepends),
    "metaspace": lambda: _with(_set("pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="always"))),
}


def _first_metaspace() -> Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "▁", "▁a", "a", "b", "c", "▁b", " "])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special("<|im_end|>")])
    return tokenizer


def _single_word() -> Tokenizer:
    return _with(lambda tokenizer: _add(tokenizer, special("<|im_start|>"), added("cat", single_word=True)))


def _strip_beside_space() -> Tokenizer:
    return _with(lambda tokenizer: _add(tokenizer, special("<r>", rstrip=True), added("\n\n")))


def _add(tokenizer: Tokenizer, *tokens: AddedToken) -> None:
    for token in tokens:
        tokenizer.add_tokens([token])


def _dropout() -> Tokenizer:
    tokenizer = _with(lambda _: None)
    assert isinstance(tokenizer.model, models.BPE)
    tokenizer.model.dropout = 0.5
    return tokenizer


# What it must refuse: name -> (tokenizer, a word of the reason).
DEPENDENT: Final[dict[str, tuple[Callable[[], Tokenizer], str]]] = {
    "single_word": (_single_word, "'cat' is single_word"),
    "strip beside space": (_strip_beside_space, "'<r>' takes whitespace"),
    "first metaspace": (_first_metaspace, "prepend_scheme first"),
    "dropout": (_dropout, "dropout 0.5"),
    "unknown pre-tokenizer": (
        lambda: _with(_set("pre_tokenizer", pre_tokenizers.FixedLength(5))),
        "pre-tokenizer FixedLength",
    ),
    "truncation": (lambda: _with(lambda tokenizer: tokenizer.enable_truncation(4)), "truncation is on"),
    "padding": (lambda: _with(lambda tokenizer: tokenizer.enable_padding(length=9)), "padding is on"),
}


def loaded(tokenizer: Tokenizer, folder: Path, template: str = CHAT_TEMPLATE) -> TextTokenizer:
    """The same through a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    )
    return load(folder)
