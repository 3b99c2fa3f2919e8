"""The rings that this process uses: the native ones, or their Python twin where that is safe.

DEEPINFER_RING=native or python forces one. Without it a missing native module is worth a warning on x86 and an error
elsewhere, because only x86 keeps the twin's plain stores in order. Both write the same bytes and may be mixed.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ipc.errors import RingUnavailableError

if TYPE_CHECKING:
    from ipc._ring import (
        BELL_BYTES,
        HEADER_BYTES,
        MESSAGE_OVERHEAD,
        PULSE_BYTES,
        BellFlag,
        MessageReader,
        MessageWriter,
        PulseBlock,
        TokenReader,
        TokenWriter,
        format_message_ring,
        format_token_ring,
    )

__all__ = [
    "BELL_BYTES",
    "HEADER_BYTES",
    "MESSAGE_OVERHEAD",
    "PULSE_BYTES",
    "BellFlag",
    "MessageReader",
    "MessageWriter",
    "PulseBlock",
    "TokenReader",
    "TokenWriter",
    "format_message_ring",
    "format_token_ring",
    "load_rings",
]

BUILD_HINT: Final = "build it with `python setup.py build_ext --inplace`"
# Machines whose processors keep stores in program order (total store order).
ORDERED_MACHINES: Final = ("x86_64", "AMD64", "i686")

log = logging.getLogger(__name__)


def load_rings(wanted: str, machine: str) -> ModuleType:
    """The module to use: `wanted` is `native`, `python` or empty for a choice. Raises RingUnavailableError."""
    if wanted not in ("", "native", "python"):
        raise RingUnavailableError(f"DEEPINFER_RING={wanted} is neither native nor python")
    if wanted == "python":
        return importlib.import_module("ipc.ring_py")
    try:
        return importlib.import_module("ipc._ring")
    except ImportError as error:
        if wanted == "native" or machine not in ORDERED_MACHINES:
            raise RingUnavailableError(
                f"the native rings cannot be loaded ({error}) on {machine}: {BUILD_HINT}"
            ) from error
        log.warning("native rings cannot be loaded (%s), using the slower Python ones: %s", error, BUILD_HINT)
        return importlib.import_module("ipc.ring_py")


if not TYPE_CHECKING:
    _rings = load_rings(os.environ.get("DEEPINFER_RING", ""), platform.machine())
    BELL_BYTES = _rings.BELL_BYTES
    HEADER_BYTES = _rings.HEADER_BYTES
    MESSAGE_OVERHEAD = _rings.MESSAGE_OVERHEAD
    PULSE_BYTES = _rings.PULSE_BYTES
    BellFlag = _rings.BellFlag
    MessageReader = _rings.MessageReader
    MessageWriter = _rings.MessageWriter
    PulseBlock = _rings.PulseBlock
    TokenReader = _rings.TokenReader
    TokenWriter = _rings.TokenWriter
    format_message_ring = _rings.format_message_ring
    format_token_ring = _rings.format_token_ring
