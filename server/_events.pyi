"""Types of the native module `csrc/events_module.cpp`; `server/events.py` has its Python twin."""

# ruff: noqa: PYI021 - the native module carries no docstrings of its own, they are read here
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class PieceTable:
    """What each id adds to a text, as UTF-8 bytes; None and ids beyond the table add nothing."""

    def __init__(self, pieces: Sequence[bytes | None], /) -> None: ...

class EventWriter:
    """One stream's events: `head` + JSON string of the text + `tail` for each id."""

    def __init__(self, table: PieceTable, head: bytes, tail: bytes, /, *, skip_empty: bool = False) -> None:
        """`skip_empty` writes no event without text."""

    def push(self, ids: npt.NDArray[np.int32], /) -> bytes:
        """Events of these contiguous ids; empty when none is due. Raises ValueError for another item size."""

    def text(self, token: int, /) -> str:
        """What this id adds, as text instead of an event."""

    def flush(self) -> str:
        """The rest, once no id follows: a cut character reads U+FFFD."""
