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
from engine.native.pages import LayerPages
from engine.native.sequence import BLOCK_SIZE


class CpuPages:
    """The layers of a pool in host memory, checked once. Raises ValueError for pages that the kernels cannot read."""

    def __init__(
        self, kernel: ModuleType, layers: tuple[LayerPages, ...], *, level: int = 0, use_openmp: bool = True
    ) -> None:
        assert kernel.BLOCK_SIZE == BLOCK_SIZE
        for pages in layers:
            check_pages(pages)
        self.kernel = kernel
        self.layers = layers
        self.addresses = [tuple((x.data_ptr(), x.stride(0)) for x in (pages.k, pages.v)) for pages in layers]
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
        pages = self._pages.layers[layer]
        sinks = None if form.sinks is None else form.sinks.to(torch.float32).contiguous()
        check_heads(heads, pages, sinks)
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in heads)
        out = heads.empty_out()
        self._pages.kernel.attend(
            ELEMENTS[out.dtype],
            (q.data_ptr(), q.stride(0), q.stride(1)),
            (k.data_ptr(), k.stride(0), k.stride(1)),
            (v.data_ptr(), v.stride(0), v.stride(1)),
            out.data_ptr(),
            *self._pages.addresses[layer],
            (*q.shape[:2], *pages.k.shape[2:], v.shape[2], pages.k.shape[0]),
            self._tables,
            form.scaling,
            form.window or 0,
            form.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            *self._run,
        )
        return out


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


def check_heads(heads: Heads, pages: LayerPages, sinks: torch.Tensor | None) -> None:
    """Whether projections fit the pages and each other. Raises ValueError."""
    tokens, query_heads, _ = heads.q.shape
    kv_heads, k_dim = pages.k.shape[2:]
    _check("q", heads.q, (tokens, query_heads, k_dim), pages.k.dtype)
    _check("k", heads.k, (tokens, kv_heads, k_dim), pages.k.dtype)
    _check("v", heads.v, (tokens, kv_heads, pages.v.shape[3]), pages.k.dtype)
    if sinks is not None and (sinks.shape != (query_heads,) or not sinks.is_cpu):
        raise ValueError(f"sinks {list(sinks.shape)} on {sinks.device}, wanted [{query_heads}] on cpu")


def _check(name: str, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if rows.shape != shape or rows.dtype != dtype or not rows.is_cpu:
        found = f"{list(rows.shape)} {rows.dtype} on {rows.device}"
        raise ValueError(f"{name}: {found}, wanted {list(shape)} {dtype} on cpu")
