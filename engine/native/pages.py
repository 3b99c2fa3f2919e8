"""The pool of keys and values, page-major: one block of all layers is one run of bytes.

    page of a block: | K layer 0 | V layer 0 | K layer 1 | V layer 1 | ...
    K of a layer:    [BLOCK_SIZE, kv_heads, k_dim]    V: [BLOCK_SIZE, kv_heads, v_dim]

A page moves to and from the host cache in one piece; a layer is a strided view of the pool. Layers may differ in
shape. Knows nothing about sequences.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from engine.native.sequence import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def k_elements(self) -> int:
        """Elements of a block's keys."""
        return BLOCK_SIZE * self.kv_heads * self.k_dim

    @property
    def v_elements(self) -> int:
        """Elements of a block's values."""
        return BLOCK_SIZE * self.kv_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where each layer lies in a page."""

    model_type: str
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]

    @property
    def page_bytes(self) -> int:
        """Size of one block, all layers."""
        return sum(shape.k_elements + shape.v_elements for shape in self.layers) * self.dtype.itemsize

    @property
    def largest_layer_bytes(self) -> int:
        """Keys and values of one token in the layer that stores most."""
        return max(shape.k_elements + shape.v_elements for shape in self.layers) // BLOCK_SIZE * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """Short hash; pages with equal digests mean the same to two ranks that run the same weights."""
        shapes = [(shape.kv_heads, shape.k_dim, shape.v_dim) for shape in self.layers]
        text = repr((self.model_type, str(self.dtype), BLOCK_SIZE, shapes))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of the pool: `k` and `v` are [num_blocks, BLOCK_SIZE, kv_heads, dim], strided by page."""

    k: torch.Tensor
    v: torch.Tensor


class PagePool:
    """Device memory for `num_blocks` pages.

    Zeroed, because attention reads whole blocks and masks the part beyond the context: a masked NaN would still
    be a NaN after the weighted sum.
    """

    def __init__(self, layout: PageLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.bytes = _zeros((num_blocks, layout.page_bytes), device)
        self.layers = _views(self.bytes.view(layout.dtype), layout)

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks whose owner produced values that are not finite, before someone else gets them."""
        self.bytes[blocks] = 0


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Zero bytes. On a CPU by numpy, which leaves it to the system to zero a page of memory when it is first used;
    torch writes, and so commits, all of it at once."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _views(elements: torch.Tensor, layout: PageLayout) -> tuple[LayerPages, ...]:
    views, at = [], 0
    for shape in layout.layers:
        k = elements[:, at : at + shape.k_elements]
        v = elements[:, at + shape.k_elements : at + shape.k_elements + shape.v_elements]
        views.append(
            LayerPages(
                k.view(-1, BLOCK_SIZE, shape.kv_heads, shape.k_dim),
                v.view(-1, BLOCK_SIZE, shape.kv_heads, shape.v_dim),
            )
        )
        at += shape.k_elements + shape.v_elements
    return tuple(views)
