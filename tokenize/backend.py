"""What every way of encoding offers: `Backend`, and `HfBackend`, the one the others must equal.

Ids leave as int32 numpy arrays; the beginning and end that `add_special_tokens` adds are `Frame`'s business, so a
backend encodes bare text only. Knows nothing about choosing, caches of prefixes or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from server.tokenizer.errors import TokenizerLoadError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Ids = npt.NDArray[np.int32]

NO_IDS: Final[Ids] = np.empty(0, np.int32)
# Up to here `tokenizers` takes about a millisecond on a slow core: short enough for an event loop.
HF_INLINE_CHARACTERS: Final = 1024
# A list of ids becomes an array in slices of this size: other threads wait for the interpreter during one of them.
SLICE: Final = 8192


@dataclass(slots=True)
class CacheCounts:
    """What a cache did since it was made."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class Backend(Protocol):
    """Text -> ids. Every call may come from any thread; errors for invalid Unicode are TypeError or ValueError."""

    @property
    def name(self) -> str:
        """As `--tokenizer-backend` spells it."""
        ...

    @property
    def inline_characters(self) -> int:
        """A text up to here takes no longer than about a millisecond."""
        ...

    def encode(self, text: str) -> Ids:
        """Ids of the text alone, shape [tokens]."""
        ...

    def counts(self) -> CacheCounts:
        """Of its own cache."""
        ...


class HfBackend:
    """`tokenizers` itself."""

    name: Final = "hf"
    inline_characters: Final = HF_INLINE_CHARACTERS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Ids:
        """See `Backend.encode`."""
        # The batch call is the one that drops the interpreter lock, and it skips offsets nobody asked for.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return ids_of(encoding)

    def counts(self) -> CacheCounts:
        """It has none."""
        return CacheCounts()


def ids_of(encoding: Encoding) -> Ids:
    """The ids of an encoding."""
    found = encoding.ids
    if len(found) <= SLICE:
        return np.array(found, np.int32)
    slices = [np.array(found[at : at + SLICE], np.int32) for at in range(0, len(found), SLICE)]
    return np.concatenate(slices)


# Texts of which the frame is read: the same ids must stand around all of them.
FRAME_TEXTS: Final = ("a", "Hello, world", "1 2\n3")


@dataclass(frozen=True, slots=True)
class Frame:
    """What `add_special_tokens` puts before and after a text: the same for every text."""

    before: Ids
    after: Ids

    def around(self, ids: Ids) -> Ids:
        """The framed ids."""
        if not len(self.before) and not len(self.after):
            return ids
        return np.concatenate((self.before, ids, self.after))


def frame_of(tokenizer: Tokenizer) -> Frame:
    """Read from examples. Raises TokenizerLoadError for a post-processor that does more than frame."""
    frames = {_frame(tokenizer, text) for text in FRAME_TEXTS}
    if len(frames) != 1 or None in frames:
        raise TokenizerLoadError("its post-processor does more than put special tokens around a text")
    ((before, after),) = (frame for frame in frames if frame is not None)
    return Frame(np.array(before, np.int32), np.array(after, np.int32))


def _frame(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    bare, full = (tokenizer.encode(text, add_special_tokens=added).ids for added in (False, True))
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at]), tuple(full[at + len(bare) :])
    return None
