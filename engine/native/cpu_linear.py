"""Linear layers over few rows by the native kernel: decodes, and prompts of which little is left to compute.

Promises the layer's own result beyond rounding, and torch's product wherever that is the faster one. Weights stay
where they are; nothing is copied or packed. A layer that uses the kernel runs no hooks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear

# Up to so many rows the kernel wins: decodes, and the last tokens of a prompt whose beginning is cached. It reads
# weights once, and from several places at a time. With more, arithmetic costs more than reading and torch's blocking
# does it better; where the two meet depends on the processor.
MAX_ROWS: Final = 64


class Product:
    """`x weight^T + bias` for one weight [N, D] and bias [N], checked once. Raises ValueError for other tensors.

    They must stay where they are as long as this lives, which keeps them alive.
    """

    __slots__ = ("_addresses", "_bias", "_columns", "_kernel", "_level", "_weight", "depth")

    def __init__(self, kernels: ModuleType, weight: torch.Tensor, bias: torch.Tensor | None, *, level: int = 0) -> None:
        self._columns, self.depth = weight.shape
        _check("weight", weight)
        if bias is not None:
            _check("bias", bias)
            if bias.shape != (self._columns,):
                raise ValueError(f"bias {list(bias.shape)} does not fit a weight of {list(weight.shape)}")
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._addresses = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        self._kernel, self._level = kernels.linear, level

    def by_kernel(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., D] -> [.., N]. Raises ValueError for one that the kernel cannot read."""
        *outer, depth = x.shape
        _check("x", x)
        if depth != self.depth:
            raise ValueError(f"x {list(x.shape)} does not fit a weight of {[self._columns, self.depth]}")
        x = x.contiguous()
        out = x.new_empty((*outer, self._columns))
        shape = (x.numel() // max(1, depth), self._columns, depth)
        self._kernel(x.data_ptr(), *self._addresses, out.data_ptr(), shape, self._level, torch.get_num_threads())
        return out

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """The same by torch, for any number of rows."""
        return torch_linear(x, self._weight, self._bias)


def use_kernels(model: nn.Module, kernels: ModuleType) -> int:
    """Let the plain float32 linear layers of a model on a CPU use the kernel. Returns how many do."""
    chosen = [module for module in model.modules() if type(module) is nn.Linear and _fits(module.weight)]
    for module in chosen:
        # Only the class changes: parameters, names and ties of weights stay what the model's own code made them.
        module.__class__ = CpuLinear
        module.product = Product(kernels, module.weight.detach(), module.bias)  # type: ignore[assignment]
    return len(chosen)


def _fits(weight: torch.Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_cpu and weight.is_contiguous()


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, wanted torch.float32 on cpu")


class CpuLinear(nn.Linear):
    """`nn.Linear` for inference."""

    product: Product

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """[.., in_features] -> [.., out_features]."""
        product = self.product
        if input.numel() > MAX_ROWS * product.depth:
            return product.by_torch(input)
        return product.by_kernel(input)

    # Some two hundred calls a step: what torch looks up before it calls `forward` is a percent of a small step.
    __call__ = forward
