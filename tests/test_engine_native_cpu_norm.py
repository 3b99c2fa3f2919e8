"""The normalisation kernel against plain torch, and which layers of a model get it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.native import _kernels
from engine.native.cpu_norm import CpuNorm, Norm, use_kernels
from tests.attention_steps import KERNEL


def plain(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The definition, in double precision."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).float()


@pytest.mark.parametrize("level", range(len(_kernels.LEVELS)), ids=_kernels.LEVELS)
@settings(deadline=None)  # also run under sanitizers, without conftest.py
@given(
    rows=st.integers(0, 40),
    size=st.integers(1, 200),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 100),
)
def test_it_is_what_it_is_defined_to_be(*, level: int, rows: int, size: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, rows, generator=generator).T * scale  # not dense
    weight = torch.randn(size, generator=generator)
    torch.testing.assert_close(Norm(KERNEL, weight, 1e-5, level=level)(x), plain(x, weight, 1e-5))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_breaks_itself_only(value: float) -> None:
    """The engine ends a request whose logits are not finite; a kernel that hid it would serve garbage."""
    x = torch.randn(3, 40)
    x[1, 7] = value
    out = Norm(KERNEL, torch.ones(40), 1e-5)(x)
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()


def test_results_are_the_same_bits_on_any_number_of_threads() -> None:
    x, norm = torch.randn(70, 100), Norm(KERNEL, torch.randn(100), 1e-5)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(norm(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class OtherRMSNorm(LlamaRMSNorm):
    """Named like the others, and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(-1, 1)


def test_layers_that_compute_it_get_it_and_keep_their_weights() -> None:
    model = nn.ModuleList(
        [LlamaRMSNorm(24), Gemma3RMSNorm(24), OtherRMSNorm(24), LlamaRMSNorm(24).bfloat16(), nn.RMSNorm(24)]
    )
    weights = list(model.parameters())
    for weight in weights:
        nn.init.normal_(weight)
    x = torch.randn(1, 5, 24)
    with torch.inference_mode():
        expected = [layer(x) for layer in model]
        assert use_kernels(model, KERNEL) == 2
        assert [isinstance(layer, CpuNorm) for layer in model] == [True, True, False, False, False]
        assert [type(layer).__name__ for layer in model][:2] == ["LlamaRMSNorm", "Gemma3RMSNorm"]
        for layer, weight, before in zip(model, weights, expected, strict=True):
            assert layer.weight is weight
            torch.testing.assert_close(layer(x), before)


def test_tensors_that_do_not_fit_are_refused() -> None:
    norm = Norm(KERNEL, torch.ones(8), 1e-5)
    for message, x in (
        ("x is torch.float64", torch.zeros(4, 8).double()),
        ("x is torch.float32 on meta", torch.zeros(4, 8, device="meta")),
        (r"x \[4, 7\] does not fit a weight of \[8\]", torch.zeros(4, 7)),
    ):
        with pytest.raises(ValueError, match=message):
            norm(x)
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16"):
        Norm(KERNEL, torch.ones(8).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="must not be negative"):
        KERNEL.normalize(0, 0, 0, 1, -1, 1e-5, 0, 1)
    with pytest.raises(ValueError, match="level 9 is not one of"):
        KERNEL.normalize(0, 0, 0, 1, 1, 1e-5, 9, 1)
