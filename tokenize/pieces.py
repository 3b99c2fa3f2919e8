"""Token id -> the piece of text or bytes it stands for, after the tokenizer's own decoder.

Reads the decoder's description once and keeps only what a stream needs, so that `detok.Detokenizer` pays one look-up
a token. A decoder whose pieces depend on what comes later is refused by name rather than streamed wrongly.
Knows nothing about streams.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from server.tokenizer.errors import TokenizerLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ID: Final = 2**32 - 1  # the Rust side takes unsigned 32-bit ids and raises on others
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The steps of a sentencepiece-like decoder, in the one order in which each acts on a token without its neighbours.
STEPS: Final = ("Replace", "ByteFallback", "Fuse", "Strip")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: a visible Latin-1 byte is itself, the others follow U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


ALPHABET: Final = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Form:
    """How token strings turn into text: the decoder's steps, as far as they act on one token or on the text's start."""

    byte_level: bool = False  # strings spell bytes in ALPHABET; nothing below applies
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # "<0xE2>" is one byte
    first_drops: str = ""  # what vanishes from the first token
    strip: str = " "  # the character removed from the start of the whole text,
    strip_count: int = 0  # at most so many times


class Pieces:
    """The pieces of one tokenizer, spelled when an id is first seen."""

    def __init__(self, backend: Tokenizer) -> None:
        """Raises TokenizerLoadError if the decoder cannot be streamed."""
        self._backend = backend
        self._spelled: dict[int, str | bytes] = {}
        self.form: Final = read_form(backend)
        self.special: Final = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )

    def piece(self, token: int) -> str | bytes | None:
        """Text, or bytes that may be part of a character; None for an id outside the vocabulary."""
        known = self._spelled.get(token)
        if known is not None:
            return known
        string = self._string(token)
        if string is None:
            return None
        return self._spelled.setdefault(int(token), self._spell(string))

    def first_piece(self, token: int) -> str | bytes | None:
        """The same where the token opens the text."""
        string = self._string(token)
        return None if string is None else self._spell(string.replace(self.form.first_drops, ""))

    def text_of(self, token: int) -> str:
        """A part of a character reads U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        piece = self.piece(token)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def _string(self, token: int) -> str | None:
        return self._backend.id_to_token(int(token)) if 0 <= token <= MAX_ID else None

    def _spell(self, string: str) -> str | bytes:
        if self.form.byte_level:
            return _spell_bytes(string)
        for old, new in self.form.replacements:
            string = string.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(string) if self.form.byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else string


def _spell_bytes(string: str) -> bytes:
    try:
        return bytes(ALPHABET[character] for character in string)
    except KeyError:  # an added token with a character of its own is written as itself
        return string.encode()


def read_form(backend: Tokenizer) -> Form:
    """The decoder's description as a Form. Raises TokenizerLoadError naming the step that does not fit."""
    if backend.decoder is None:
        raise TokenizerLoadError("the tokenizer has no decoder")
    # The public way to a decoder's parameters, short of dumping the whole vocabulary with it.
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Form(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        return Form(replacements=((mark, " "),), first_drops="" if steps[0]["prepend_scheme"] == "never" else mark)
    return _sentencepiece_form(steps, kinds)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [leaf for inner in step["decoders"] for leaf in _flatten(inner)] if step["type"] == "Sequence" else [step]


def _sentencepiece_form(steps: list[dict[str, Any]], kinds: list[str]) -> Form:
    if unknown := set(kinds).difference(STEPS):
        raise TokenizerLoadError(f"a decoder step of type {min(unknown)} cannot be streamed")
    if kinds != sorted(kinds, key=STEPS.index):
        raise TokenizerLoadError(f"decoder steps in the order {', '.join(kinds)} cannot be streamed")
    strips = [step for step in steps if step["type"] == "Strip"]
    if len(strips) > 1 or any(strip["stop"] for strip in strips) or (strips and "Fuse" not in kinds):
        raise TokenizerLoadError("a decoder that strips more than the start of the text cannot be streamed")
    return Form(
        replacements=tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
        byte_fallback="ByteFallback" in kinds,
        strip=strips[0]["content"] if strips else " ",
        strip_count=strips[0]["start"] if strips else 0,
    )


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if not pattern:
        raise TokenizerLoadError(f"a decoder that replaces by pattern {step['pattern']} cannot be streamed")
    return pattern, step["content"]
