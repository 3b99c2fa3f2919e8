"""Root-mean-square normalisation by the native kernel: one pass over each row in place of six operations of torch.

Promises the layer's own result beyond rounding: every family writes this layer anew, so a layer is taken over only if
what it computes on probe rows is what the kernel computes. A layer that uses the kernel runs no hooks.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

# Names under which families keep the number that is added to the mean square.
EPSILONS: Final = ("variance_epsilon", "eps", "epsilon")
# Magnitudes of the probe rows: at the least of them the mean square is near the usual epsilons.
PROBE_SCALES: Final = (1e-3, 1.0, 1e2)
# Rounding alone: the layers compute in float32 too, but sum in another order.
PROBE_TOLERANCE: Final = 1e-5


class Norm:
    """`x / sqrt(mean(x^2) + epsilon) * weight` along the last dimension, for a float32 weight [D] on a CPU."""

    __slots__ = ("_address", "_epsilon", "_kernel", "_level", "_size", "_weight")

    def __init__(self, kernels: ModuleType, weight: torch.Tensor, epsilon: float, *, level: int = 0) -> None:
        (self._size,) = weight.shape
        _check("weight", weight)
        self._weight = weight.contiguous()
        self._address, self._epsilon = self._weight.data_ptr(), epsilon
        self._kernel, self._level = kernels.normalize, level

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., D] -> [.., D]. Raises ValueError for one that the kernel cannot read."""
        _check("x", x)
        if x.shape[-1] != self._size:
            raise ValueError(f"x {list(x.shape)} does not fit a weight of [{self._size}]")
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // max(1, self._size)
        threads = torch.get_num_threads()
        self._kernel(x.data_ptr(), self._address, out.data_ptr(), rows, self._size, self._epsilon, self._level, threads)
        return out


class CpuNorm(nn.Module):
    """Goes in front of a layer's own class."""

    norm: Norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., D] -> [.., D]."""
        return self.norm(x)

    # As in `cpu_linear.py`.
    __call__ = forward


def use_kernels(model: nn.Module, kernels: ModuleType) -> int:
    """Let the layers of a model on a CPU that normalise as the kernel does use it. Returns how many do."""
    chosen = [(module, norm) for module in model.modules() if (norm := _norm_of(module, kernels)) is not None]
    for module, norm in chosen:
        # Only the class changes, and keeps its name: parameters stay what the model's own code made them.
        module.__class__ = type(type(module).__name__, (CpuNorm, type(module)), {})
        module.norm = norm  # type: ignore[assignment]
    return len(chosen)


def _norm_of(module: nn.Module, kernels: ModuleType) -> Norm | None:
    """The kernel with this layer's weight, if it computes what the layer does."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight: Any = module.weight
    epsilon = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    alone = len(inspect.signature(module.forward).parameters) == 1 and not list(module.buffers())
    if epsilon is None or not alone or weight.ndim != 1 or weight.dtype is not torch.float32 or not weight.is_cpu:
        return None
    # Some families store what is missing to one.
    for factor in (weight.detach(), 1 + weight.detach()):
        norm = Norm(kernels, factor, epsilon)
        if _agree(module, norm, weight.shape[0]):
            return norm
    return None


@torch.inference_mode()
def _agree(module: nn.Module, norm: Norm, size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(PROBE_SCALES), size, generator=generator) * torch.tensor(PROBE_SCALES)[:, None]
    wanted = module(rows[None])
    return isinstance(wanted, torch.Tensor) and torch.allclose(
        norm(rows[None]), wanted, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE
    )


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, wanted torch.float32 on cpu")
