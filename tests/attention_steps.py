"""Steps of attention made up for tests: batches straight from counts and contexts, over pools full of leftovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

import numpy as np
import torch

from engine.native import _kernels
from engine.native.attention import Attend, Heads
from engine.native.batch import Batch
from engine.native.cpu_attention import CpuAttention, CpuPages
from engine.native.pages import LayerPages, LayerShape, PageLayout, PagePool
from engine.native.sequence import BLOCK_SIZE, blocks_for
from engine.native.step_attention import StepAttention

KERNEL: Final[ModuleType] = _kernels

# Every implementation: the torch twin, and the native kernels for each instruction set of this machine.
BACKENDS: Final[dict[str, Callable[[tuple[LayerPages, ...], Batch], Attend]]] = {
    "torch": StepAttention,
    **{
        name: lambda layers, batch, level=level: CpuAttention(CpuPages(KERNEL, layers, level=level), batch)  # type: ignore[misc]
        for level, name in enumerate(_kernels.LEVELS)
    },
}

Spans = Sequence[tuple[int, int]]
"""Tokens in this step and context after it, of each span; single tokens first, as the engine orders them."""


def batch_of(spans: Spans, seed: int = 0) -> Batch:
    """A batch whose tables are shuffled over a pool of `pool_blocks(spans)`."""
    counts, contexts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    edges = [0, *np.cumsum([blocks_for(context) for context in contexts.tolist()]).tolist()]
    tables = np.random.default_rng(seed).permutation(pool_blocks(spans))[: edges[-1]]
    return Batch(
        ids=np.zeros(counts.sum(), dtype=np.int64),
        positions=np.concatenate([np.arange(context - count, context) for count, context in spans]),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        contexts=contexts,
        table_starts=np.array(edges),
        tables=tables.astype(np.int32),
        num_decodes=int((counts == 1).sum()),
        sampled=(),
        sampled_rows=np.empty(0, dtype=np.int64),
    )


def pool_blocks(spans: Spans) -> int:
    """Blocks of a pool for these spans: two more than they need."""
    return sum(blocks_for(context) for _, context in spans) + 2


def pool_of(shape: LayerShape, blocks: int, dtype: torch.dtype, seed: int = 0) -> PagePool:
    """A pool of one layer, filled with what former tokens may have left."""
    pool = PagePool(PageLayout("x", dtype, (shape,)), blocks, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for pages in (pool.layers[0].k, pool.layers[0].v):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return pool


def heads_of(tokens: int, heads: int, shape: LayerShape, dtype: torch.dtype, seed: int = 0) -> Heads:
    """Random projections, laid out as rotary embeddings leave them: q and k by head, v by token."""
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(heads, tokens, shape.k_dim, generator=generator).transpose(0, 1)
    k = torch.randn(shape.kv_heads, tokens, shape.k_dim, generator=generator).transpose(0, 1)
    v = torch.randn(tokens, shape.kv_heads, shape.v_dim, generator=generator)
    return Heads(q.to(dtype), k.to(dtype), v.to(dtype))


def last_block(batch: Batch, span: int) -> tuple[int, int]:
    """The block of a span's last token, and the first place in it behind the context."""
    return int(batch.tables[batch.table_starts[span + 1] - 1]), int((batch.contexts[span] - 1) % BLOCK_SIZE + 1)
