"""The model's forward pass over one batch: ids in, logits of the sampled rows out.

Promises that only sampled rows go through the output head, with the model's own scaling and softcap. Knows
nothing about scheduling or sampling.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.native import cpu_linear, cpu_norm
from engine.native.attention import Attend
from engine.native.batch import Batch
from engine.native.cpu_attention import CpuAttention, CpuPages
from engine.native.cpu_kernels import load_kernels
from engine.native.device import upload
from engine.native.pages import PagePool
from engine.native.step_attention import StepAttention


class Runner:
    """Drives one model over one pool."""

    def __init__(self, model: PreTrainedModel, pool: PagePool) -> None:
        self._model = model
        self._device = pool.bytes.device
        self._layers = pool.layers
        self._cpu_pages: CpuPages | None = None
        if (kernels := load_kernels(self._device, pool.layout.dtype)) is not None:
            self._cpu_pages = CpuPages(kernels, pool.layers)
            cpu_linear.use_kernels(model, kernels)
            cpu_norm.use_kernels(model, kernels)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """float32 logits [len(batch.sampled), vocabulary]; K and V of all tokens are in the pool afterwards."""
        ids, positions, rows = (upload(x, self._device) for x in (batch.ids, batch.positions, batch.sampled_rows))
        return run_model(self._model, ids, positions, rows, self._attention(batch))

    def _attention(self, batch: Batch) -> Attend:
        if self._cpu_pages is None:
            return StepAttention(self._layers, batch)
        return CpuAttention(self._cpu_pages, batch)


def run_model(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged: Attend
) -> torch.Tensor:
    """Takes ids [T], positions [T], rows [R] of the tokens whose logits are wanted; returns float32 [R, vocabulary]."""
    out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, paged=paged)
    logits = out.logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits.float()
