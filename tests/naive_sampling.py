"""The sampler's rules once more, in the plainest numpy, one row at a time: what the tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ipc.messages import Sampling

Floats = npt.NDArray[np.float64]


def adjusted(
    logits: Floats,
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> Floats:
    """Penalties, then biases, then bans."""
    row = logits.copy()
    for token in set(prompt) | set(output):
        row[token] *= 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
    for token in set(output):
        row[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    row[list(banned)] = -np.inf
    return row


def distribution(logits: Floats, sampling: Sampling) -> Floats:
    """Probabilities after temperature, top-k, top-p (over what top-k left) and min-p."""
    scaled = logits / sampling.temperature
    kept = np.ones(scaled.shape, dtype=bool)
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    probabilities = _softmax(np.where(kept, scaled, -np.inf))
    if sampling.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        kept[order[before >= sampling.top_p]] = False
    kept &= _softmax(scaled) >= sampling.min_p * _softmax(scaled).max()
    return _softmax(np.where(kept, scaled, -np.inf))


def _softmax(row: Floats) -> Floats:
    weights = np.exp(row - row.max())
    return np.asarray(weights / weights.sum())
