"""The CUDA kernel that copies rows, built with torch's extension builder and kept in its cache.

`python -m hicache.kernel` builds it ahead of time; otherwise the first rank does while the others wait for it.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import ModuleType
from typing import Final

SOURCES: Final = Path(__file__).resolve().parent.parent / "csrc"
FILES: Final = ("page_copy.cu", "page_copy_torch.cpp")
NAME: Final = "deepinfer_page_copy"

log = logging.getLogger(__name__)


class KernelUnavailableError(RuntimeError):
    """The kernel cannot be built or loaded on this machine; the message says why."""


@functools.cache
def load() -> ModuleType:
    """The module with `copy_rows(dst, src, lists, blocks, stream)`. Takes a minute where nothing is built yet.

    Raises KernelUnavailableError.
    """
    import torch.version
    from torch.utils import cpp_extension

    if torch.version.cuda is None:
        raise KernelUnavailableError("this torch is built without CUDA")
    log.info("loading the page copy kernel; building it first takes about a minute")
    files = [str(SOURCES / name) for name in FILES]
    try:
        module: ModuleType = cpp_extension.load(NAME, files, extra_cflags=["-O2"], extra_cuda_cflags=["-O3"])
    except (OSError, RuntimeError, ImportError) as error:
        raise KernelUnavailableError(f"the page copy kernel cannot be built: {error}") from error
    return module


if __name__ == "__main__":
    load()
