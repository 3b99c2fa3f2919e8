"""Drawing one id per row from logits: the truncations and the random numbers.

Promises that a draw is a function of (seed, position, logits of that row) alone, whatever the batch around it.
top-k, top-p and min-p each become a floor under a row's logits, so ties and the order of a sort cannot matter:
what reaches the highest floor is drawn from, in id order. Knows nothing about requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.native.device import upload

# Largest ids looked at for top-p before a whole row is sorted; a nucleus is rarely larger, a full sort of 130K
# logits takes longer than a decode step of a small model.
NUCLEUS_CANDIDATES = 1024

# Bits of a uniform number. With 53 the product with a row's total could round up to the total itself.
UNIFORM_BITS = 48

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Knobs:
    """Truncation settings of R rows, each an array [R]."""

    temperature: npt.NDArray[np.float32]  # > 0
    top_k: npt.NDArray[np.int64]  # 0 keeps all
    top_p: npt.NDArray[np.float64]  # 1 keeps all
    min_p: npt.NDArray[np.float64]  # 0 keeps all


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from counters: SplitMix64's finalizer over the seed, then over a Weyl step per position.

    The first mixing keeps the streams of neighbouring seeds from being shifts of each other.
    """
    mixed = _mix(_mix(seeds) + (positions + np.uint64(1)) * _WEYL)
    return (mixed >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def draw(logits: torch.Tensor, knobs: Knobs, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """float32 logits [R, V] and uniform numbers [R] -> ids int64 [R], by the inverse of the distribution function."""
    scaled = logits / _column(knobs.temperature, logits)
    best = scaled.amax(-1, keepdim=True)
    floor = _floors(scaled, best, knobs)
    weights = torch.exp(scaled - best)
    if floor is not None:
        weights = torch.where(scaled >= floor, weights, 0.0)
    # float64: a float32 running sum over a large vocabulary loses whole ids of the tail.
    running = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    target = running[:, -1:] * upload(numbers, logits.device)[:, None]
    drawn = torch.searchsorted(running, target, right=True)[:, 0]
    return drawn.clamp_(max=logits.shape[-1] - 1)  # only reached by a row that is not finite


def _floors(scaled: torch.Tensor, best: torch.Tensor, knobs: Knobs) -> torch.Tensor | None:
    """The lowest logit that each row keeps, [R, 1]; None if all rows keep everything."""
    limits = []
    if knobs.min_p.any():
        with np.errstate(divide="ignore"):
            limits.append(best + _column(np.log(knobs.min_p), scaled))
    sorted_rows = np.flatnonzero((knobs.top_k > 0) | (knobs.top_p < 1))
    if sorted_rows.size:
        limit = torch.full_like(best, float("-inf"))
        rows = upload(sorted_rows, scaled.device)
        limit[rows] = _sorted_floors(scaled[rows], best[rows], knobs.top_k[sorted_rows], knobs.top_p[sorted_rows])
        limits.append(limit)
    return torch.stack(limits).amax(0) if limits else None


def _sorted_floors(
    scaled: torch.Tensor, best: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> torch.Tensor:
    """top-k first, then top-p over what it left, renormalised: the floor of both, [R, 1]."""
    vocabulary = scaled.shape[-1]
    top_k = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    limited = top_k[top_k < vocabulary]
    nucleus = bool((top_p < 1).any())
    count = min(vocabulary, max(int(limited.max(initial=1)), NUCLEUS_CANDIDATES if nucleus else 1))
    values = scaled.topk(count).values
    kth = values.gather(1, upload(np.minimum(top_k, count) - 1, scaled.device)[:, None])
    kth = torch.where(upload(top_k < vocabulary, scaled.device)[:, None], kth, float("-inf"))
    if not nucleus:
        return kth
    whole = torch.where(scaled >= kth, torch.exp(scaled - best), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    keep_all = top_p >= 1
    target = whole * _column(np.where(keep_all, 0.0, top_p), scaled, torch.float64)
    running = _running(values, best)
    if count < vocabulary and bool((running[:, -1:] < target).any()):
        values = scaled.sort(dim=-1, descending=True).values
        running = _running(values, best)
    place = torch.searchsorted(running, target).clamp_(max=values.shape[1] - 1)
    nucleus_floor = values.gather(1, place).masked_fill_(upload(keep_all, scaled.device)[:, None], float("-inf"))
    return torch.maximum(kth, nucleus_floor)


def _running(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(torch.exp(values - best), dim=-1, dtype=torch.float64)


def _column(values: npt.NDArray[np.floating], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return upload(values, like.device).to(dtype or like.dtype)[:, None]
