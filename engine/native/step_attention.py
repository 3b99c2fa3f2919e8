"""Attention of one step over the page pool in torch: store the step's K and V, then attend through block tables.

Serves where the native kernels do not, and is the twin that they are checked against. Promises that nothing is kept
between steps and that no copy or mask grows with the square of the context. Knows nothing about the schedule or the
rest of the model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.native import kernels
from engine.native.attention import Heads
from engine.native.batch import Batch, Chunk
from engine.native.device import upload
from engine.native.kernels import Form
from engine.native.pages import LayerPages
from engine.native.runs import cut, first_block
from engine.native.sequence import BLOCK_SIZE

# Queries of one tile. A masked kernel computes the hidden triangle too; tiles keep that triangle small.
QUERY_TILE = 512

# Elements of one tile's mask, or of its scores where the kernel needs them: 128 MiB in float32 at any context.
MAX_TILE_ELEMENTS = 1 << 25


class DeviceRun(NamedTuple):
    """A `runs.Run` on the device."""

    start: int
    end: int
    blocks: torch.Tensor
    mask: torch.Tensor


class StepAttention:
    """The tables of one step. Decodes are cut into runs once for each window size that the layers use."""

    def __init__(self, layers: tuple[LayerPages, ...], batch: Batch) -> None:
        self._layers = layers
        self._decodes, self._chunks = batch.decodes(), batch.chunks()
        self._like = layers[0].k
        self._where = tuple(self._upload(array) for array in batch.places())
        self._tables = [self._upload(chunk.table.astype(np.int64)) for chunk in self._chunks]
        self._runs: dict[int | None, list[DeviceRun]] = {}

    def attend(self, layer: int, heads: Heads, form: Form) -> torch.Tensor:
        """Store k and v, then attend: decodes by runs, prompt chunks one by one."""
        pages = self._layers[layer]
        pages.k[self._where] = heads.k
        pages.v[self._where] = heads.v
        out = heads.empty_out()
        for run in self._device_runs(form.window):
            count, places = run.mask.shape
            k, v = (_gather(x, run.blocks, count)[:, :places] for x in (pages.k, pages.v))
            out[run.start : run.end] = kernels.decode(heads.q[run.start : run.end], k, v, run.mask, form)
        for chunk, table in zip(self._chunks, self._tables, strict=True):
            rows = heads.rows(chunk.start, chunk.end)
            out[chunk.start : chunk.end] = _attend_chunk(chunk, table, pages, rows, form)
        return out

    def _device_runs(self, window: int | None) -> list[DeviceRun]:
        runs = self._runs.get(window)
        if runs is None:
            runs = [
                DeviceRun(run.start, run.end, self._upload(run.blocks), self._upload(run.mask).to(self._like.dtype))
                for run in cut(self._decodes, window)
            ]
            self._runs[window] = runs
        return runs

    def _upload(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(array, self._like.device)


def _attend_chunk(chunk: Chunk, table: torch.Tensor, pages: LayerPages, heads: Heads, form: Form) -> torch.Tensor:
    """A chunk in tiles of queries, each over the keys it can see. A prompt's first chunk needs no gather."""
    tokens = chunk.end - chunk.start
    past = chunk.context - tokens
    if not past and _in_one_piece(tokens, heads.q.shape[1], form):
        return kernels.prefill(heads.q, heads.k, heads.v, None, form)
    low = first_block(past + 1, form.window)
    k, v = (_gather(x, table[low:], 1)[0] for x in (pages.k, pages.v)) if past else (heads.k, heads.v)
    out = heads.empty_out()
    tile = _tile(chunk.context, heads.q.shape[1], form)
    for start in range(0, tokens, tile):
        end = min(start + tile, tokens)
        seen = 0 if form.window is None else max(0, past + start + 1 - form.window)
        keys = slice(seen - low * BLOCK_SIZE, past + end - low * BLOCK_SIZE)
        mask = _mask(past + start, past + end, seen, form.window, heads.q)
        out[start:end] = kernels.prefill(heads.q[start:end], k[keys], v[keys], mask, form)
    return out


def _in_one_piece(tokens: int, heads: int, form: Form) -> bool:
    """Whether a prompt's first chunk is plain causal and small enough for the kernel that takes it."""
    plain = form.window is None or form.window >= tokens
    return plain and (form.fusable or tokens <= _tile(tokens, heads, form))


def _tile(context: int, heads: int, form: Form) -> int:
    """Queries of one tile: the mask is shared by all heads, explicit scores are not."""
    each = context if form.fusable else context * heads
    return min(QUERY_TILE, max(1, MAX_TILE_ELEMENTS // each))


def _mask(first: int, last: int, seen: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive mask of the queries `first .. last` over the keys `seen .. last`."""
    queries = torch.arange(first, last, device=like.device)[:, None]
    keys = torch.arange(seen, last, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _gather(pages: torch.Tensor, blocks: torch.Tensor, sequences: int) -> torch.Tensor:
    """Pages [num_blocks, BLOCK_SIZE, A, D] of `sequences` equally long tables -> a copy [sequences, S, A, D]."""
    copy = pages.index_select(0, blocks)
    return copy.view(sequences, -1, *pages.shape[2:])
