"""Logits to ids for a whole batch, with log-probabilities for those who asked.

Order: log-probabilities of the model's own distribution; `adjust`; greedy rows take the best id; the others divide
by temperature and draw through top-k, top-p, min-p (`draw`). Log-probabilities come first, so that they say what
the model thought, not what the knobs made of it. Knows nothing about sequences or finishing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.native.adjust import Row, adjust
from engine.native.device import upload
from engine.native.draw import Knobs, draw, uniform

# Below this a division by the temperature overflows float32; such a row has one possible outcome anyway.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Top:
    """The most probable ids of one row, best first, natural logarithms."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Samples:
    """Results of R rows, on the host."""

    tokens: npt.NDArray[np.int64]  # [R]
    finite: npt.NDArray[np.bool_]  # [R] False: the row's logits are broken and its token means nothing
    logprobs: npt.NDArray[np.float32]  # [R] 0 where not asked for
    tops: dict[int, Top]  # by row


class Sampler:
    """Holds what is constant: the ids that `min_tokens` forbids."""

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self._eos_ids = tuple(eos_ids)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Samples:
        """float32 logits [R, V], edited in place."""
        asked = np.array([row.sampling.logprobs >= 0 for row in rows])
        places = upload(np.flatnonzero(asked), logits.device)
        own = torch.log_softmax(logits[places], dim=-1) if asked.any() else None
        adjust(logits, rows, self._eos_ids)
        best, tokens = logits.max(dim=-1)
        self._draw(logits, rows, tokens)
        samples = Samples(
            tokens=tokens.cpu().numpy(),
            finite=torch.isfinite(best).cpu().numpy(),
            logprobs=np.zeros(len(rows), dtype=np.float32),
            tops={},
        )
        if own is not None:
            samples.logprobs[asked] = own.gather(1, tokens[places][:, None])[:, 0].cpu().numpy()
            samples.tops.update(_tops(own, rows, np.flatnonzero(asked)))
        return samples

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row], tokens: torch.Tensor) -> None:
        """Replace the best ids of the rows with a temperature by drawn ones."""
        chosen = [index for index, row in enumerate(rows) if row.sampling.temperature >= MIN_TEMPERATURE]
        if not chosen:
            return
        drawn = [rows[index] for index in chosen]
        numbers = uniform(
            np.array([row.sampling.seed for row in drawn], dtype=np.uint64),
            np.array([row.position for row in drawn], dtype=np.uint64),
        )
        places = upload(np.array(chosen), logits.device)
        tokens[places] = draw(logits[places], _knobs(drawn), numbers)


def _knobs(rows: Sequence[Row]) -> Knobs:
    settings = [row.sampling for row in rows]
    return Knobs(
        temperature=np.array([one.temperature for one in settings], dtype=np.float32),
        top_k=np.array([one.top_k for one in settings], dtype=np.int64),
        top_p=np.array([one.top_p for one in settings], dtype=np.float64),
        min_p=np.array([one.min_p for one in settings], dtype=np.float64),
    )


def _tops(own: torch.Tensor, rows: Sequence[Row], asked: npt.NDArray[np.int64]) -> dict[int, Top]:
    """The k best of each row that wants k > 0, from log-probabilities [len(asked), V]."""
    wanted = [min(rows[index].sampling.logprobs, own.shape[1]) for index in asked.tolist()]
    if not any(wanted):
        return {}
    values, ids = (part.cpu().numpy() for part in own.topk(max(wanted)))
    return {
        row: Top(tuple(ids[place, :count].tolist()), tuple(values[place, :count].tolist()))
        for place, (row, count) in enumerate(zip(asked.tolist(), wanted, strict=True))
        if count
    }
