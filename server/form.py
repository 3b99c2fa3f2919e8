"""How an endpoint writes its answer: what chat and text have in common.

Streams go one of two ways with the same bytes: bare ids through a writer, or pieces where more is wanted of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from server.envelope import Envelope, Usage
from server.events import EventWriter
from server.generate import Piece
from server.services import Services


class Form(ABC):
    """The bytes of one request's answer. An endpoint says what a choice, a chunk and its text look like."""

    def __init__(self, services: Services, envelope: Envelope, *, logprobs: bool) -> None:
        self._tokenizer = services.tokenizer
        self._writers = services.writers
        self._envelope = envelope
        self._logprobs = logprobs

    # ---- streamed ----

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Events before a choice's first token."""

    def writer(self, index: int) -> EventWriter | None:
        """Writes a choice's events from bare ids; None when more than their text is wanted."""
        return None if self._logprobs else self._text_writer(index)

    @abstractmethod
    def last(self, index: int, text: str, finish_reason: str) -> bytes:
        """A choice's last event, after those of its writer."""

    def events(self, index: int, pieces: Sequence[Piece], usage: Usage | None) -> bytes:
        """Events of a batch of pieces; with `usage` each carries the counts up to it, `usage` being those before."""
        found = []
        for piece in pieces:
            usage = usage and usage.one_more()
            if self._shows(piece):
                found.append(self._chunk(index, piece, usage))
        return b"".join(found)

    def usage_event(self, usage: Usage) -> bytes:
        """The event that carries the usage, after all choices."""
        return self._envelope.usage_event(usage)

    # ---- whole ----

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON document of an answer that is not streamed."""
        return self._envelope.document([self._choice(*numbered) for numbered in enumerate(choices)], usage)

    # ---- what endpoints differ in ----

    @abstractmethod
    def _text_writer(self, index: int) -> EventWriter: ...

    @abstractmethod
    def _shows(self, piece: Piece) -> bool: ...

    @abstractmethod
    def _chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes: ...

    @abstractmethod
    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]: ...
