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


class CpuAttention:
    """The tables of one step, over the layers of a pool in host memory."""

    def __init__(
        self,
        kernel: ModuleType,
        layers: tuple[LayerPages, ...],
        batch: Batch,
        *,
        level: int = 0,
        use_openmp: bool = True,
    ) -> None:
        assert kernel.BLOCK_SIZE == BLOCK_SIZE
        self._kernel = kernel
        self._layers = layers
        self._tables = (batch.starts, batch.contexts, batch.table_starts, batch.tables)
        self._run = (level, torch.get_num_threads(), use_openmp)

    def attend(self, layer: int, heads: Heads, form: Form) -> torch.Tensor:
        """Store k and v, then attend. Raises ValueError for tensors or tables that do not fit the pages."""
        pages = self._layers[layer]
        heads = Heads(*(x if x.stride(2) == 1 else x.contiguous() for x in heads))
        sinks = None if form.sinks is None else form.sinks.to(torch.float32).contiguous()
        check(heads, pages, sinks)
        out = heads.empty_out()
        self._kernel.attend(
            ELEMENTS[out.dtype],
            *((x.data_ptr(), x.stride(0), x.stride(1)) for x in heads),
            out.data_ptr(),
            *((x.data_ptr(), x.stride(0)) for x in (pages.k, pages.v)),
            (*heads.q.shape[:2], *pages.k.shape[2:], pages.v.shape[3], pages.k.shape[0]),
            self._tables,
            form.scaling,
            form.window or 0,
            form.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            *self._run,
        )
        return out


def check(heads: Heads, pages: LayerPages, sinks: torch.Tensor | None) -> None:
    """Whether tensors are what the kernel takes their memory for. Raises ValueError."""
    tokens, query_heads, _ = heads.q.shape
    blocks, _, kv_heads, k_dim = pages.k.shape
    v_dim = pages.v.shape[3]
    dtype = pages.k.dtype
    if dtype not in ELEMENTS:
        raise ValueError(f"pages of {dtype}, the kernels take {', '.join(ELEMENTS.values())}")
    _check_pages("k", pages.k, (blocks, BLOCK_SIZE, kv_heads, k_dim), dtype)
    _check_pages("v", pages.v, (blocks, BLOCK_SIZE, kv_heads, v_dim), dtype)
    _check_rows("q", heads.q, (tokens, query_heads, k_dim), dtype)
    _check_rows("k", heads.k, (tokens, kv_heads, k_dim), dtype)
    _check_rows("v", heads.v, (tokens, kv_heads, v_dim), dtype)
    if sinks is not None and (sinks.shape != (query_heads,) or sinks.device.type != "cpu"):
        raise ValueError(f"sinks {list(sinks.shape)} on {sinks.device}, wanted [{query_heads}] on cpu")


def _check_pages(name: str, pages: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_rows(f"pages of {name}", pages, shape, dtype)
    heads, dim = shape[2:]
    # A stride of a dimension with one entry says nothing and may be anything.
    if shape[0] > 0 and not pages[0].is_contiguous():
        raise ValueError(f"pages of {name} have strides {pages.stride()}, a block must be dense")
    if pages.stride(0) < BLOCK_SIZE * heads * dim and shape[0] > 1:
        raise ValueError(f"pages of {name} have strides {pages.stride()}, blocks must not overlap")


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if rows.shape != shape or rows.dtype != dtype or rows.device.type != "cpu":
        raise ValueError(
            f"{name}: {list(rows.shape)} {rows.dtype} on {rows.device}, wanted {list(shape)} {dtype} on cpu"
        )
