"""What this machine can compute with: device, element type, threads, and the way up to the device.

Promises that a type without hardware support is never chosen silently slow: half types on a plain CPU become
float32. Knows nothing about models.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.native.errors import LaunchError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Linux names of the instructions that multiply matrices of that type, x86 and Arm; without one of them torch
# emulates the type and a prompt takes 4-5 times as long as in float32.
CPU_FLAGS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def choose_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank: `auto` is one CUDA card a rank where there are cards, else the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda") or not torch.cuda.is_available():
        raise LaunchError(f"device {wanted!r} (DEEPINFER_ACCELERATOR) is not here: torch {torch.__version__} has none")
    count = torch.cuda.device_count()
    if rank >= count:
        raise LaunchError(f"rank {rank} needs a CUDA card of its own, but only {count} are visible")
    return torch.device("cuda", rank)


def choose_dtype(wanted: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in: the one asked for, or for `auto` the stored one if this device multiplies it."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise LaunchError(f"dtype {wanted!r} is unknown (known: auto, {', '.join(DTYPES)})")
        return DTYPES[wanted]
    flags = CPU_FLAGS.get(stored)
    if device.type == "cpu" and flags is not None and not flags & cpu_flags():
        return torch.float32
    return stored


def cpu_flags() -> frozenset[str]:
    """Instruction set flags of this CPU; empty where Linux does not tell."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def choose_threads(wanted: int, world: int) -> int:
    """Threads of one rank: the number asked for, or an equal share of the cores this process may use."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // world)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device: no copy on a CPU; through pinned memory and without waiting on CUDA."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
