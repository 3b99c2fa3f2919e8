"""The choice between the native kernels and torch: `engine.native._kernels` where it is built and serves the pool.

DEEPINFER_KERNELS=native or torch forces one of the two. `cpu_attention.py` and `cpu_linear.py` wrap the kernels.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Final

import torch

from engine.native.errors import LaunchError

VARIABLE: Final = "DEEPINFER_KERNELS"
BUILD_HINT: Final = "build it with `python setup.py build_ext --inplace`"
ELEMENTS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

log = logging.getLogger(__name__)


def load_kernels(device: torch.device, dtype: torch.dtype, wanted: str | None = None) -> ModuleType | None:
    """The kernels, if they serve this device and type; None leaves it to torch.

    `wanted` is native, torch or empty; by default the variable decides. Raises LaunchError where they are forced but
    cannot serve. A missing build is worth a warning.
    """
    wanted = os.environ.get(VARIABLE, "") if wanted is None else wanted
    if wanted not in ("", "native", "torch"):
        raise LaunchError(f"{VARIABLE}={wanted} is neither native nor torch")
    if wanted == "torch":
        return None
    if device.type != "cpu" or dtype not in ELEMENTS:
        if wanted:
            raise LaunchError(f"{VARIABLE}=native: the kernels serve no {dtype} on {device.type}")
        return None
    try:
        return importlib.import_module("engine.native._kernels")
    except ImportError as error:
        if wanted:
            raise LaunchError(f"{VARIABLE}=native: cannot be loaded ({error}); {BUILD_HINT}") from error
        log.warning("the native kernels cannot be loaded (%s), using slower torch code: %s", error, BUILD_HINT)
        return None
