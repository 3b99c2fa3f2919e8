"""Linear layers over few rows by the native kernel: the decodes of a small batch.

Promises the layer's own result beyond rounding, and torch's product wherever that is the faster one. Weights stay
where they are; nothing is copied or packed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

# Rows between which the kernel wins: with fewer, torch's matrix-vector product reads weights as fast; with more,
# arithmetic costs more than reading and torch's blocking does it better.
MIN_ROWS: Final = 3
MAX_ROWS: Final = 16


def use_kernels(model: nn.Module, kernels: ModuleType) -> int:
    """Let the plain float32 linear layers of a model on a CPU use the kernel. Returns how many do."""
    chosen = [module for module in model.modules() if type(module) is nn.Linear and _fits(module.weight)]
    for module in chosen:
        # Only the class changes: parameters, names and ties of weights stay what the model's own code made them.
        module.__class__ = CpuLinear
        module.kernels = kernels  # type: ignore[assignment]
    return len(chosen)


def _fits(weight: torch.Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


class CpuLinear(nn.Linear):
    """`nn.Linear` for inference."""

    kernels: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """[.., in_features] -> [.., out_features]."""
        rows = input.numel() // self.in_features
        if not MIN_ROWS <= rows <= MAX_ROWS:
            return super().forward(input)
        return linear(self.kernels, input, self.weight, self.bias)


def linear(
    kernels: ModuleType, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, level: int = 0
) -> torch.Tensor:
    """x [.., D] weight [N, D] bias [N] -> [.., N]. Raises ValueError for tensors the kernel cannot read."""
    columns, depth = weight.shape
    given = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, wanted torch.float32 on cpu")
    if x.shape[-1] != depth or (bias is not None and bias.shape != (columns,)):
        raise ValueError(f"x {list(x.shape)} or the bias does not fit a weight of {list(weight.shape)}")
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty((*x.shape[:-1], columns))
    shape = (x.numel() // max(1, depth), columns, depth)
    addresses = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    kernels.linear(*addresses, shape, level, torch.get_num_threads())
    return out
