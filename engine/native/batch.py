"""One step as flat arrays: every token of every span in one row, decodes first, and where its K and V lie.

Promises numpy only and no Python work per token. Knows nothing about torch; the runner uploads it.
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
    """T tokens of S spans. The first `num_decodes` spans are one token each, longest context first.

    Span i owns rows `starts[i] .. starts[i + 1]`, the last of the `contexts[i]` tokens whose K and V lie in the blocks
    `tables[table_starts[i] .. table_starts[i + 1]]` when the step is over.
    """

    ids: Int64  # [T]
    positions: Int64  # [T]
    starts: Int64  # [S + 1]
    contexts: Int64  # [S]
    table_starts: Int64  # [S + 1]
    tables: Int32  # [table_starts[S]]
    num_decodes: int
    sampled: tuple[Sequence, ...]  # sequences whose last known token is in this step
    sampled_rows: Int64  # [len(sampled)] the row of that token

    def places(self) -> tuple[Int64, Int64]:
        """The block that takes each token's K and V, and the place in that block: [T] and [T]."""
        spans = np.repeat(np.arange(len(self.contexts)), np.diff(self.starts))
        blocks = self.tables[self.table_starts[spans] + self.positions // BLOCK_SIZE]
        return blocks.astype(np.int64), self.positions % BLOCK_SIZE

    def decodes(self) -> tuple[Decode, ...]:
        """The spans of one token, one by one."""
        return tuple(Decode(int(self.contexts[span]), self._table(span)) for span in range(self.num_decodes))

    def chunks(self) -> tuple[Chunk, ...]:
        """The other spans, one by one."""
        return tuple(
            Chunk(int(self.starts[span]), int(self.starts[span + 1]), int(self.contexts[span]), self._table(span))
            for span in range(self.num_decodes, len(self.contexts))
        )

    def _table(self, span: int) -> Int32:
        return self.tables[self.table_starts[span] : self.table_starts[span + 1]]


def build(spans: List[Span]) -> Batch:
    """Lay out a plan. Sorting decodes by context lets attention work on runs of similar length."""
    ordered = sorted(spans, key=lambda span: (span.tokens > 1, -span.sequence.computed))
    sequences = [span.sequence for span in ordered]
    counts = np.array([span.tokens for span in ordered], dtype=np.int64)
    computed = np.array([sequence.computed for sequence in sequences], dtype=np.int64)
    lengths = np.array([sequence.length for sequence in sequences], dtype=np.int64)
    contexts = computed + counts
    starts, table_starts = _edges(counts), _edges(-(-contexts // BLOCK_SIZE))
    widths = np.diff(table_starts).tolist()
    done = np.flatnonzero(contexts == lengths)
    return Batch(
        ids=np.concatenate([_tokens(span) for span in ordered]).astype(np.int64),
        positions=np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts),
        starts=starts,
        contexts=contexts,
        table_starts=table_starts,
        tables=np.concatenate([one.table[:width] for one, width in zip(sequences, widths, strict=True)]),
        num_decodes=int((counts == 1).sum()),
        sampled=tuple(sequences[index] for index in done.tolist()),
        sampled_rows=starts[1:][done] - 1,
    )


def _tokens(span: Span) -> Int32:
    first = span.sequence.computed
    return span.sequence.tokens[first : first + span.tokens]


def _edges(counts: Int64) -> Int64:
    """Where each part starts, and at last where all end: [n] -> [n + 1]."""
    edges = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges
