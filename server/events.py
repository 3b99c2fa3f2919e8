"""Token ids -> the bytes of their server-sent events, many at a time, without an object per token.

The native writer (`csrc/events_module.cpp`) serves tokenizers whose pieces are bytes; the twin here serves all, and
machines without a compiler. Both give the same bytes. Knows nothing about sockets or requests.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from server.tokenizer.detok import Detokenizer
from server.tokenizer.load import TextTokenizer
from server.tokenizer.pieces import Pieces

if TYPE_CHECKING:
    from server._events import PieceTable

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]


class EventWriter(Protocol):
    """One stream's events; see `server/_events.pyi`."""

    def push(self, ids: Ids, /) -> bytes:
        """Events of these ids; empty when none is due."""
        ...

    def text(self, token: int, /) -> str:
        """What this id adds, as text instead of an event."""
        ...

    def flush(self) -> str:
        """The rest, once no id follows."""
        ...


class PyEventWriter:
    """The twin, over `Detokenizer`."""

    def __init__(self, pieces: Pieces, head: bytes, tail: bytes, *, skip_empty: bool = False) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._head, self._tail = head, tail
        self._skip_empty = skip_empty

    def push(self, ids: Ids, /) -> bytes:
        """See `EventWriter.push`."""
        texts = (self._detokenizer.push([token]) for token in ids.tolist())
        shown = (text for text in texts if text or not self._skip_empty)
        return b"".join(self._head + msgspec.json.encode(text) + self._tail for text in shown)

    def text(self, token: int, /) -> str:
        """See `EventWriter.text`."""
        return self._detokenizer.push([token])

    def flush(self) -> str:
        """See `EventWriter.flush`."""
        return self._detokenizer.flush()


class EventWriters:
    """Makes writers for one tokenizer; the native table is built once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._pieces: Final = tokenizer.pieces
        self._table = _native_table(tokenizer)

    @property
    def native(self) -> bool:
        """Whether writers are the native ones."""
        return self._table is not None

    def writer(self, head: bytes, tail: bytes, *, skip_empty: bool) -> EventWriter:
        """A writer for one stream."""
        if self._table is None:
            return PyEventWriter(self._pieces, head, tail, skip_empty=skip_empty)
        from server._events import EventWriter as NativeWriter

        return NativeWriter(self._table, head, tail, skip_empty=skip_empty)


def _native_table(tokenizer: TextTokenizer) -> PieceTable | None:
    pieces = tokenizer.pieces
    if not pieces.form.byte_level:
        return None
    try:
        native = importlib.import_module("server._events")
    except ImportError:
        log.warning("server._events is not built: events are written in Python, several times slower")
        return None
    found = [None if token in pieces.special else pieces.bytes_of(token) for token in range(tokenizer.vocab_size)]
    table: PieceTable = native.PieceTable(found)
    return table
