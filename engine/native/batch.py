"""One step as flat arrays: every token of every span in one row, decodes first, and where its K and V go.

Promises numpy only and no Python work per prompt token. Knows nothing about torch; `attention.py` uploads it.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.native.scheduler import Span
from engine.native.sequence import BLOCK_SIZE, Sequence

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Decode:
    """One token of a sequence with `context` tokens, itself included."""

    context: int
    table: Int32  # [blocks_for(context)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `context - (end - start) .. context` of a sequence, in rows `start .. end` of the batch."""

    start: int
    end: int
    context: int
    table: Int32  # [blocks_for(context)]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of a step. Row i < len(decodes) belongs to `decodes[i]`, longest context first."""

    ids: Int64  # [T]
    positions: Int64  # [T]
    blocks: Int64  # [T] block that takes the token's K and V
    offsets: Int64  # [T] place in that block
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]
    sampled: tuple[Sequence, ...]  # sequences whose last known token is in this step
    sampled_rows: Int64  # [len(sampled)] the row of that token


def build(spans: List[Span]) -> Batch:
    """Lay out a plan. Sorting decodes by context lets attention work on runs of similar length."""
    ordered = sorted(spans, key=lambda span: (span.tokens > 1, -span.sequence.computed))
    counts = np.array([span.tokens for span in ordered], dtype=np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1])
    ids, positions, blocks = (np.empty(total, dtype=np.int64) for _ in range(3))
    for (sequence, count), end in zip(ordered, ends.tolist(), strict=True):
        first, rows = sequence.computed, slice(end - count, end)
        ids[rows] = sequence.tokens[first : first + count]
        positions[rows] = np.arange(first, first + count)
        blocks[rows] = sequence.table[positions[rows] // BLOCK_SIZE]
    done = [index for index, span in enumerate(ordered) if span.tokens == span.sequence.remaining]
    return Batch(
        ids=ids,
        positions=positions,
        blocks=blocks,
        offsets=positions % BLOCK_SIZE,
        decodes=tuple(_decode(span) for span in ordered if span.tokens == 1),
        chunks=tuple(_chunk(s, end) for s, end in zip(ordered, ends.tolist(), strict=True) if s.tokens > 1),
        sampled=tuple(ordered[index].sequence for index in done),
        sampled_rows=ends[done] - 1,
    )


def _decode(span: Span) -> Decode:
    context = span.sequence.computed + 1
    return Decode(context, span.sequence.table[: -(-context // BLOCK_SIZE)])


def _chunk(span: Span, end: int) -> Chunk:
    context = span.sequence.computed + span.tokens
    return Chunk(end - span.tokens, end, context, span.sequence.table[: -(-context // BLOCK_SIZE)])
