"""Ids as they come -> printable text, never half a character (step 10 of a request).

Promises that the deltas joined are what decoding all ids at once gives, that prompt text is never in them, and that a
token costs the same at the end of a long answer as at its start. Knows nothing about requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from server.tokenizer.pieces import Form, Pieces

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One answer's text. Starts at the answer's first token, so nothing of the prompt can show."""

    def __init__(self, pieces: Pieces, *, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._skipped = pieces.special if skip_special else frozenset()
        self._spell = pieces.first_piece if pieces.form.first_drops else pieces.piece
        self._joiner: _Joiner = _Utf8Joiner() if pieces.form.byte_level else _FallbackJoiner(pieces.form)

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain once these ids are known; "" while a character is incomplete."""
        found = []
        for token in ids:
            piece = None if token in self._skipped else self._spell(token)
            if piece is not None:
                found.append(piece)
                self._spell = self._pieces.piece
        return self._joiner.push(found)

    def flush(self) -> str:
        """The rest, once no id follows: a cut character reads U+FFFD, as in a one-shot decode."""
        return self._joiner.flush()


class _Joiner(Protocol):
    def push(self, pieces: Iterable[str | bytes]) -> str: ...

    def flush(self) -> str: ...


class _Utf8Joiner:
    """Byte-level pieces: one stream of bytes, in which only the last three can be an open character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Iterable[str | bytes]) -> str:
        return self._decoder.decode(b"".join(piece for piece in pieces if isinstance(piece, bytes)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FallbackJoiner:
    """Text pieces with runs of single bytes between them.

    A run is text only if all of it is valid UTF-8, otherwise each of its bytes reads U+FFFD: so it is held to its end.
    """

    def __init__(self, form: Form) -> None:
        self._run = bytearray()
        self._strip = form.strip
        self._strip_left = form.strip_count

    def push(self, pieces: Iterable[str | bytes]) -> str:
        texts: list[str] = []
        for piece in pieces:
            if isinstance(piece, bytes):
                self._run += piece
            else:
                texts += (self._end_run(), piece)
        return self._stripped("".join(texts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while text and self._strip_left:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
