"""Texts on which a backend must equal `tokenizer.encode` before it may serve: hard ones, made from the tokenizer.

Every added token alone, doubled, with spaces around and inside a word; neighbours of each other; and what tokenizers
get wrong: scripts, joined emoji, combining marks, line ends, long digits and spaces, code, control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, HfBackend
from server.tokenizer.verify import first_difference

# Tokenizers with thousands of placeholders repeat themselves: the first and the last ones of each kind speak for all.
TOKENS_PER_KIND: Final = 64
# Ids shown on both sides of a first difference.
SHOWN_IDS: Final = 4
SHOWN_CHARACTERS: Final = 60
SURROGATES: Final = ("\ud800", "a\udfffb")

TEXTS: Final = (
    "",
    " ",
    "a",
    "Hello, world! It's we'll they're I'M DON'T",
    "The quick brown fox\njumps over\r\nthe lazy dog.\r\n\r\n\tTabbed  twice   thrice",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — «déjà vu» … ½ ² ﬁ Å Å",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过了懒狗。いろはにほへと ちりぬるを、カタカナ。키스의 고유조건은 입술끼리 만나야 하고",
    "نص حكيم له سر قاطع وذو شأن עטלף אבק נס דרך ऋषियों को सताने वाले ไทยคนไทย",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷🇩🇪 ❤️ 🎉🎉 1️⃣ \u200d\u200b\ufeff",
    "e\u0301 a\u0308\u0323 n\u0303 \u0301 q\u0307\u0323 Z\u0351\u036b\u0343\u036a\u0302 한\u1100\u1161\u11a8",
    "1 12 123 1234 12345 1234567890123456789012345678901234567890 3.14159 1,000,000 0x1F ١٢٣ ३४५ ⅷ",
    " " * 37 + "x" + "\t" * 19 + "y" + "\n" * 23 + "z" + " \n \r\n  \r \u3000\u00a0\u2003 \x85\u2028",
    "def f(x):\n    return {k: v[1:-1] for k, v in x.items() if v != '\\n'}  # => 'ok'\n\n\nif __name__:\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\\\"}<div class="x">&amp;</div> SELECT * FROM t WHERE a<>b; a->b::c<d>();',
    "\x00\x01\x07\x08\x1b[31m\x1c\x1d\x1e\x1f\x7f\x80\x9f\ufffd\ufffe\uffff\U0010ffff\ue000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!!!!!!!!????====----____....",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\Users\\x /usr/lib ../.. ~/.config",
    "ΑΣ ας İi ıI ǅ ß ẞ ſt ㋀ Ⅳ ｆｕｌｌ ﷺ ﬀ",
)


def texts(added: AddedTokens, conversation: str) -> Iterator[str]:
    """All probes; `conversation` is one as the model's own template renders it."""
    yield from TEXTS
    yield "\n".join(TEXTS)
    tokens = _chosen(added)
    for token in tokens:
        yield from (
            token,
            token * 2,
            f" {token} ",
            f"  {token}\n\n{token}\t",
            f"in{token}side",
            f"{token} a",
            f"é{token}",
        )
        yield from (token[:-1], token[1:], token[0] + token)
    for first, second in pairwise(tokens):
        yield f"{first}{second}"
        yield f"a {first} {second} b"
    yield " text ".join(tokens)
    yield conversation
    yield conversation.replace("\n", "\r\n") * 3


def first_failure(backend: Backend, reference: HfBackend, probes: Iterator[str]) -> str | None:
    """The first probe on which the backend differs, in words; None when it passes them all."""
    for text in probes:
        ids, expected = backend.encode(text), reference.encode(text)
        if not np.array_equal(ids, expected):
            at = first_difference(ids, expected)
            span = slice(max(0, at - SHOWN_IDS), at + SHOWN_IDS)
            return (
                f"{_short(text)}: from id {span.start} it gives {ids[span].tolist()}, "
                f"tokenizer.encode {expected[span].tolist()}"
            )
    for text in SURROGATES:
        try:
            ids = backend.encode(text)
        except (TypeError, UnicodeEncodeError):
            continue
        return f"{text!r} is not valid Unicode and it gives {ids[:SHOWN_IDS].tolist()}"
    return None


def _chosen(added: AddedTokens) -> list[str]:
    """Added tokens to probe: all kinds of flags, the first and the last of each."""
    kinds: dict[tuple[bool, ...], list[str]] = {}
    for token in added.by_id.values():
        flags = (token.special, token.normalized, token.lstrip, token.rstrip, token.single_word)
        kinds.setdefault(flags, []).append(token.content)
    return [token for kind in kinds.values() for token in _ends(kind)]


def _ends(tokens: Sequence[str]) -> Sequence[str]:
    half = TOKENS_PER_KIND // 2
    return tokens if len(tokens) <= TOKENS_PER_KIND else [*tokens[:half], *tokens[-half:]]


def _short(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]!r}... ({len(text)} characters)"
