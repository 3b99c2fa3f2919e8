"""Attention of one step on a CPU by the native kernels, which read the pages in place.

Promises one native call a layer for the whole step, and that no address leaves here before the tensor behind it was
checked. `step_attention.py` is its twin in torch.
"""

from __future__ import annotations

from types import ModuleType

import torch

from engine.native.attention import Heads
from engine.native.batch import Batch
from engine.native.cpu_kernels import ELEMENTS
from engine.native.kernels import Form
from engine.native.pages import LayerPages, LayerShape
from engine.native.sequence import BLOCK_SIZE


class CpuPages:
    """The layers of a pool in host memory, checked once. Raises ValueError for pages that the kernels cannot read."""

    def __init__(
        self, kernel: ModuleType, layers: tuple[LayerPages, ...], *, level: int = 0, use_openmp: bool = True
    ) -> None:
        assert kernel.BLOCK_SIZE == BLOCK_SIZE
        for pages in layers:
            check_pages(pages)
        self.attend = kernel.attend
        self.layers = layers
        self.addresses = [tuple((x.data_ptr(), x.stride(0)) for x in (pages.k, pages.v)) for pages in layers]
        self.shapes = [LayerShape(pages.k.shape[2], pages.k.shape[3], pages.v.shape[3]) for pages in layers]
        self.dtype, self.blocks = layers[0].k.dtype, layers[0].k.shape[0]
        assert all(pages.k.dtype is self.dtype and pages.k.shape[0] == self.blocks for pages in layers)
        self.element = ELEMENTS[self.dtype]
        self.level = level
        self.use_openmp = use_openmp


class CpuAttention:
    """The tables of one step over the pages."""

    def __init__(self, pages: CpuPages, batch: Batch) -> None:
        self._pages = pages
        self._tables = (batch.starts, batch.contexts, batch.table_starts, batch.tables)
        self._run = (pages.level, torch.get_num_threads(), pages.use_openmp)

    def attend(self, layer: int, heads: Heads, form: Form) -> torch.Tensor:
        """Store k and v, then attend. Raises ValueError for tensors or tables that do not fit the pages."""
        # What is asked of a tensor here is asked once a layer in every step; so nothing is asked twice.
        pages = self._pages
        shape = pages.shapes[layer]
        sinks = None if form.sinks is None else form.sinks.to(torch.float32).contiguous()
        check_heads(heads, shape, pages.dtype, sinks)
        q, k, v = map(_dense, heads)
        out = heads.empty_out()
        pages.attend(
            pages.element,
            (q.data_ptr(), *q.stride()[:2]),
            (k.data_ptr(), *k.stride()[:2]),
            (v.data_ptr(), *v.stride()[:2]),
            out.data_ptr(),
            *pages.addresses[layer],
            (*out.shape[:2], shape.kv_heads, shape.k_dim, shape.v_dim, pages.blocks),
            self._tables,
            form.scaling,
            form.window or 0,
            form.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            *self._run,
        )
        return out


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


def check_pages(pages: LayerPages) -> None:
    """Whether pages are what the kernel takes their memory for. Raises ValueError."""
    blocks, _, kv_heads, k_dim = pages.k.shape
    if pages.k.dtype not in ELEMENTS:
        raise ValueError(f"pages of {pages.k.dtype}, the kernels take {', '.join(ELEMENTS.values())}")
    for name, rows, dim in (("k", pages.k, k_dim), ("v", pages.v, pages.v.shape[3])):
        _check(f"pages of {name}", rows, (blocks, BLOCK_SIZE, kv_heads, dim), pages.k.dtype)
        if blocks > 0 and not rows[0].is_contiguous():
            raise ValueError(f"pages of {name} have strides {rows.stride()}, a block must be dense")
        if blocks > 1 and rows.stride(0) < BLOCK_SIZE * kv_heads * dim:
            raise ValueError(f"pages of {name} have strides {rows.stride()}, blocks must not overlap")


def check_heads(heads: Heads, shape: LayerShape, dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    """Whether projections fit a layer's pages and each other. Raises ValueError."""
    tokens, query_heads, _ = heads.q.shape
    _check("q", heads.q, (tokens, query_heads, shape.k_dim), dtype)
    _check("k", heads.k, (tokens, shape.kv_heads, shape.k_dim), dtype)
    _check("v", heads.v, (tokens, shape.kv_heads, shape.v_dim), dtype)
    if sinks is not None and (sinks.shape != (query_heads,) or not sinks.is_cpu):
        raise ValueError(f"sinks {list(sinks.shape)} on {sinks.device}, wanted [{query_heads}] on cpu")


def _check(name: str, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if rows.shape != shape or rows.dtype != dtype or not rows.is_cpu:
        found = f"{list(rows.shape)} {rows.dtype} on {rows.device}"
        raise ValueError(f"{name}: {found}, wanted {list(shape)} {dtype} on cpu")
