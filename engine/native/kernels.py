"""Attention over gathered keys and values in plain torch: the reference that any faster kernel must match.

Grouped-query heads are never repeated in memory. Softcap and sinks need the scores themselves and take the
explicit path; everything else goes to torch's fused kernel. Knows nothing about blocks or sequences.

Shapes: H query heads, A key/value heads, G = H / A, T query tokens, S keys, N sequences, D and E head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Form:
    """How a layer turns q.k into weights: `softmax(cap(q.k * scaling))`, the sinks in the denominator only."""

    scaling: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # cap(x) = softcap * tanh(x / softcap)
    sinks: torch.Tensor | None = None  # [H] one extra logit a head that attracts weight but has no value

    @property
    def fusable(self) -> bool:
        """Whether torch's fused kernel computes it."""
        return self.softcap is None and self.sinks is None


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, form: Form) -> torch.Tensor:
    """One token each of N sequences: q [N, H, D], k [N, S, A, D], v [N, S, A, E], additive mask [N, S] -> [N, H, E].

    The heads of a group are the rows of one small matrix, so K and V are read once a group.
    """
    sequences, heads, size = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    rows = q.view(sequences, k.shape[1], -1, size)
    mask = mask[:, None, None]
    if form.fusable:
        out = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=form.scaling)
    else:
        sinks = None if form.sinks is None else form.sinks.view(1, k.shape[1], -1, 1)
        out = _weigh(_scores(rows, k, form) + mask, v, sinks)
    return out.reshape(sequences, heads, -1)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, form: Form) -> torch.Tensor:
    """Tokens of one sequence: q [T, H, D], k [S, A, D], v [S, A, E], additive mask [T, S] -> [T, H, E].

    `mask=None` means plain causal and needs T == S.
    """
    tokens, heads, size = q.shape
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    groups = q.transpose(0, 1).view(k.shape[0], -1, tokens, size)
    attend = _prefill_fused if form.fusable else _prefill_explicit
    return attend(groups, k, v, mask, form).reshape(heads, tokens, -1).transpose(0, 1)


def _prefill_fused(
    groups: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """groups [A, G, T, D] -> [A, G, T, E]; K and V are shared within a group by a stride of zero."""
    shared = (-1, groups.shape[1], -1, -1)
    k, v = k[:, None].expand(shared), v[:, None].expand(shared)
    return scaled_dot_product_attention(groups, k, v, attn_mask=mask, is_causal=mask is None, scale=form.scaling)


def _prefill_explicit(
    groups: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """groups [A, G, T, D] -> [A, G * T, E]; the tokens of a group's heads are the rows of one matrix."""
    heads, group, tokens, _ = groups.shape
    scores = _scores(groups.flatten(1, 2), k, form).view(heads, group, tokens, -1)
    if mask is None:
        mask = scores.new_full((tokens, tokens), float("-inf")).triu_(1)
    sinks = None
    if form.sinks is not None:
        sinks = form.sinks.view(heads, group, 1).expand(-1, -1, tokens).reshape(heads, -1, 1)
    return _weigh((scores + mask).flatten(1, 2), v, sinks)


def _scores(q: torch.Tensor, k: torch.Tensor, form: Form) -> torch.Tensor:
    """In float32: half types lose the small differences that softmax lives on."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    return scores


def _weigh(scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        # exp(s) / (sum exp(s) + exp(sink)) = softmax(s) * sigmoid(logsumexp(s) - sink)
        weights = weights * torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - sinks.float())
    return torch.matmul(weights.to(v.dtype), v)
