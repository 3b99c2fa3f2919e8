"""The native modules of this package, or their Python twins with a warning: both give the same answers."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Final

BUILD_HINT: Final = "build it with `python setup.py build_ext --inplace`"

log = logging.getLogger(__name__)


def load(native: str, twin: str) -> ModuleType:
    """The module `native`, or `twin` where it is not built."""
    try:
        return importlib.import_module(native)
    except ImportError as error:
        log.warning("%s cannot be loaded (%s), using the slower %s: %s", native, error, twin, BUILD_HINT)
        return importlib.import_module(twin)
