"""Whether a tokenizer encodes the pieces between its added tokens independently, judged by its configuration.

Promises a reason where it does not, or where a part is of a kind that nobody has reviewed: an unknown part is refused,
never trusted. What it accepts, `segment` and the reuse of prefixes rely on. Knows nothing about any text.

Reviewed kinds look at one piece at a time: pre-tokenizers and normalizers run piece by piece, models word by word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from server.tokenizer.added import WHITE_SPACE, description

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMALIZERS: Final = frozenset(
    ("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Replace", "Prepend", "Strip", "StripAccents",
     "BertNormalizer", "Precompiled", "ByteLevel")
)  # fmt: skip
PRE_TOKENIZERS: Final = frozenset(
    ("Sequence", "ByteLevel", "Split", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation",
     "BertPreTokenizer", "UnicodeScripts", "CharDelimiterSplit")
)  # fmt: skip
MODELS: Final = frozenset(("BPE", "Unigram", "WordPiece", "WordLevel"))


def why_dependent(backend: Tokenizer) -> str | None:
    """Why pieces cannot be encoded on their own, naming the part and its value; None where they can."""
    reasons = (*_added(backend), *_normalizer(backend), *_pre_tokenizer(backend), *_model(backend), *_sizes(backend))
    return reasons[0] if reasons else None


def _added(backend: Tokenizer) -> Iterator[str]:
    tokens = backend.get_added_tokens_decoder().values()
    for token in tokens:
        if token.single_word:
            yield f"added token {token.content!r} is single_word: text beyond a piece decides whether it counts"
    strips = [token.content for token in tokens if token.lstrip or token.rstrip]
    spaces = [token.content for token in tokens if token.content and token.content.strip(WHITE_SPACE) != token.content]
    if strips and spaces:
        yield f"added token {strips[0]!r} takes whitespace, of which added token {spaces[0]!r} is made"


def _normalizer(backend: Tokenizer) -> Iterator[str]:
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] not in NORMALIZERS:
            yield f"normalizer {step['type']} is not known to work piece by piece"


def _pre_tokenizer(backend: Tokenizer) -> Iterator[str]:
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in PRE_TOKENIZERS:
            yield f"pre-tokenizer {step['type']} is not known to work piece by piece"
        if step.get("prepend_scheme") == "first":
            yield "pre-tokenizer Metaspace has prepend_scheme first: the text's first piece is special"


def _model(backend: Tokenizer) -> Iterator[str]:
    kind = type(backend.model).__name__
    if kind not in MODELS:
        yield f"model {kind} is not known to work word by word"
    if getattr(backend.model, "dropout", None):
        yield f"model BPE has dropout {backend.model.dropout}: its ids are random"


def _sizes(backend: Tokenizer) -> Iterator[str]:
    if backend.truncation is not None:
        yield f"truncation is on: {backend.truncation}"
    if backend.padding is not None:
        yield f"padding is on: {backend.padding}"


def _steps(part: object, children: str) -> Iterator[dict[str, Any]]:
    return iter(()) if part is None else _leaves(description(part), children)


def _leaves(step: dict[str, Any], children: str) -> Iterator[dict[str, Any]]:
    yield step
    for inner in step.get(children, ()):
        yield from _leaves(inner, children)
