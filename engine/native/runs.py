"""The decodes of a step, cut into runs that are attended together over whole blocks.

Promises bounded padding and a bounded gather, whatever mix of contexts is in the batch. numpy only; knows nothing
about layers but the size of a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.native.batch import Decode
from engine.native.sequence import BLOCK_SIZE

# Bounds the copy of K (and again of V) that one gather makes: at 1,024 elements a token in float32 it is 256 MiB.
MAX_GATHERED_TOKENS = 65536

# A run is padded to its widest row; the next run starts where the padding would exceed what it pads.
MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `start .. end` of the batch, each over `width` blocks."""

    start: int
    end: int
    blocks: npt.NDArray[np.int64]  # [(end - start) * width]
    mask: npt.NDArray[np.float32]  # [end - start, places up to the longest row's last token], 0 or -inf


def first_block(context: int, window: int | None) -> int:
    """The first block that the last of `context` tokens can see."""
    return 0 if window is None else max(0, context - window) // BLOCK_SIZE


def cut(decodes: Sequence[Decode], window: int | None) -> list[Run]:
    """Runs over decodes sorted by falling context."""
    widths = [len(decode.table) - first_block(decode.context, window) for decode in decodes]
    runs, start = [], 0
    for row in range(1, len(decodes) + 1):
        widest = max(widths[start:row])
        if row == len(decodes) or _full(row + 1 - start, widest, widths[row]):
            runs.append(_run(start, decodes[start:row], window, widest))
            start = row
    return runs


def _full(rows: int, widest: int, width: int) -> bool:
    """Whether a run is better closed than widened to `rows` rows by one of `width` blocks."""
    return widest > MAX_PADDING * width or rows * max(widest, width) * BLOCK_SIZE > MAX_GATHERED_TOKENS


def _run(start: int, decodes: Sequence[Decode], window: int | None, width: int) -> Run:
    blocks = np.empty((len(decodes), width), dtype=np.int64)
    contexts = np.array([decode.context for decode in decodes])[:, None]
    skips = [first_block(decode.context, window) for decode in decodes]
    for row, decode, skip in zip(blocks, decodes, skips, strict=True):
        held = decode.table[skip:]
        row[: len(held)] = held
        # Padding repeats a block of the same sequence: always readable, and masked.
        row[len(held) :] = held[-1]
    starts = np.array(skips)[:, None] * BLOCK_SIZE
    places = starts + np.arange((contexts - starts).max())
    hidden = places >= contexts
    if window is not None:
        hidden |= places < contexts - window
    mask = np.zeros(hidden.shape, dtype=np.float32)
    mask[hidden] = -np.inf
    return Run(start, start + len(decodes), blocks.reshape(-1), mask)
