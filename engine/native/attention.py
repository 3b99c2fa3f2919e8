"""The hook that transformers' modelling code calls once a layer in place of its own attention.

The step's state comes along as the extra keyword `paged` of the model's forward. Promises that no mask is ever
built by transformers. Knows nothing about pages: whoever is behind `paged` does the work.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine.native.kernels import Form

NAME = "paged"  # transformers builds no mask for a name that it has no mask function for


class Heads(NamedTuple):
    """One layer's projections of T tokens, rotated: q [T, H, D], k [T, A, D], v [T, A, E]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def rows(self, start: int, end: int) -> Heads:
        """The tokens `start .. end`."""
        return Heads(self.q[start:end], self.k[start:end], self.v[start:end])

    def empty_out(self) -> torch.Tensor:
        """Room for the result [T, H, E]."""
        return self.q.new_empty((self.q.shape[0], self.q.shape[1], self.v.shape[2]))


class Attend(Protocol):
    """What stands behind the keyword `paged`."""

    def attend(self, layer: int, heads: Heads, form: Form) -> torch.Tensor:
        """Attention of one layer -> [T, H, E]."""
        ...


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Attend,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Takes query [1, H, T, D], key and value [1, A, T, D] after rotation; returns ([1, T, H, E], None)."""
    assert attention_mask is None, "the paged attention makes its own masks"
    layer = module.layer_idx
    assert isinstance(layer, int)
    form = Form(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    # Once a layer in every step: `squeeze` costs a third of what indexing does.
    q, k, v = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    heads = Heads(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    return paged.attend(layer, heads, form).unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
