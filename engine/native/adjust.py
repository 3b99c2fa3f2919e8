"""What a request does to its logits before anything is drawn: penalties, biases, forbidden ends.

Order and why: penalties first, because they speak of the model's own logits (a repetition penalty multiplies, and
would distort a bias); then the bias, the user's word on single ids; last the ban of end-of-sequence ids before
`min_tokens`, which nothing may lift. Edits logits in place, touching only the ids concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.native.device import upload
from engine.native.history import TokenHistory
from ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits and the request it belongs to."""

    sampling: Sampling
    position: int  # of the token to be drawn, in prompt + output
    banned: bool  # no end-of-sequence id yet
    history: TokenHistory | None


def needs_history(sampling: Sampling) -> bool:
    """Whether a request must keep a TokenHistory."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0)


def adjust(logits: torch.Tensor, rows: Sequence[Row], eos_ids: Sequence[int]) -> None:
    """Apply all of it to float32 logits [R, V]."""
    penalised = [(index, row.sampling, row.history) for index, row in enumerate(rows) if row.history is not None]
    if penalised:
        _penalise(logits, penalised)
    biased = [(index, row.sampling.logit_bias) for index, row in enumerate(rows) if row.sampling.logit_bias]
    if biased:
        _bias(logits, biased)
    banned = [index for index, row in enumerate(rows) if row.banned]
    if banned and eos_ids:
        where = np.repeat(banned, len(eos_ids)), np.tile(eos_ids, len(banned))
        logits[_upload(where, logits)] = float("-inf")


def _penalise(logits: torch.Tensor, rows: Iterable[tuple[int, Sampling, TokenHistory]]) -> None:
    """Repetition: of ids in prompt or output, l/r if l > 0 else l*r. Then l - frequency*count - presence*(count>0)."""
    places, ids, repetition, minus = [], [], [], []
    for index, sampling, history in rows:
        seen = np.flatnonzero(history.seen)
        counts = history.counts[seen]
        places.append(np.full(seen.size, index))
        ids.append(seen)
        repetition.append(np.full(seen.size, sampling.repetition_penalty, dtype=np.float32))
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        minus.append(penalty.astype(np.float32))
    where = _upload((np.concatenate(places), np.concatenate(ids)), logits)
    factor, less = _upload((np.concatenate(repetition), np.concatenate(minus)), logits)
    old = logits[where]
    logits[where] = torch.where(old > 0, old / factor, old * factor) - less


def _bias(logits: torch.Tensor, rows: Sequence[tuple[int, dict[int, float]]]) -> None:
    places = np.repeat([index for index, _ in rows], [len(bias) for _, bias in rows])
    ids = np.fromiter((token for _, bias in rows for token in bias), dtype=np.int64)
    values = np.fromiter((value for _, bias in rows for value in bias.values()), dtype=np.float32)
    place, token, value = _upload((places, ids, values), logits)
    logits[place, token] += value


def _upload(arrays: Iterable[npt.NDArray[np.generic]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(upload(array, like.device) for array in arrays)
