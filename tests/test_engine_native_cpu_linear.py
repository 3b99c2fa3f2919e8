"""The linear layer over few rows against torch's, and who gets it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear as torch_linear

from engine.native import _kernels
from engine.native.cpu_linear import MAX_ROWS, CpuLinear, Product, use_kernels
from tests.attention_steps import KERNEL


@pytest.mark.parametrize("level", range(len(_kernels.LEVELS)), ids=_kernels.LEVELS)
@settings(deadline=None)  # also run under sanitizers, without conftest.py
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 100),
    depth=st.integers(1, 100),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_it_equals_torchs(*, level: int, rows: int, columns: int, depth: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(depth, rows, generator=generator).T  # not dense
    weight = torch.randn(columns, depth, generator=generator)
    added = torch.randn(columns, generator=generator) if bias else None
    ours = Product(KERNEL, weight, added, level=level).by_kernel(x)
    torch.testing.assert_close(ours, torch_linear(x, weight, added), rtol=1e-4, atol=1e-4)


def test_results_are_the_same_bits_on_any_number_of_threads() -> None:
    x, weight = torch.randn(7, 100), torch.randn(333, 100)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(Product(KERNEL, weight, None).by_kernel(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_plain_layers_of_a_model_get_it_and_keep_their_weights() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 4), Special(4, 4), nn.Linear(4, 3, bias=False).bfloat16())
    weight = model[0].weight
    with torch.inference_mode():
        expected = {rows: model[0](torch.ones(1, rows, 8)) for rows in (0, 1, MAX_ROWS, MAX_ROWS + 1)}
        assert use_kernels(model, KERNEL) == 1
        assert [type(module) for module in model] == [CpuLinear, Special, nn.Linear]
        assert model[0].weight is weight
        for rows, before in expected.items():
            torch.testing.assert_close(model[0](torch.ones(1, rows, 8)), before)


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight, bias = torch.zeros(4, 8), torch.zeros(3, 8), torch.zeros(3)
    for message, given_x, given_weight, given_bias in (
        ("x is torch.float64", x.double(), weight, bias),
        ("weight is torch.bfloat16", x, weight.bfloat16(), bias),
        ("bias is torch.float32 on meta", x, weight, bias.to("meta")),
        (r"does not fit a weight of \[3, 8\]", x[:, :7], weight, bias),
        (r"bias \[2\] does not fit a weight of \[3, 8\]", x, weight, bias[:2]),
    ):
        with pytest.raises(ValueError, match=message):
            Product(KERNEL, given_weight, given_bias).by_kernel(given_x)
    with pytest.raises(ValueError, match="must not be negative"):
        KERNEL.linear(0, 0, 0, 0, (1, -1, 1), 0, 1)
    with pytest.raises(ValueError, match="level 9 is not one of"):
        KERNEL.linear(0, 0, 0, 0, (1, 1, 1), 9, 1)
