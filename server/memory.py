"""How the C library's allocator treats the large, short-lived blocks that requests are made of.

A long prompt takes megabytes for milliseconds: body, texts, ids. By default each of them is mapped, zeroed page by page
as it is touched, and given back; in threads other than the first nearly always. That took a third of a cold prompt's
processor time. Knows nothing about requests.
"""

from __future__ import annotations

import ctypes
from typing import Final

# The names and numbers of malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

# One arena for all threads: others give their memory back whenever they are empty. Few threads allocate here, and the
# encoders among them rarely.
ARENAS: Final = 1
# The most that glibc takes.
MAPPED_BYTES: Final = 32 * 2**20
# Free memory that stays: some long prompts' worth.
KEPT_BYTES: Final = 128 * 2**20


def keep_memory() -> bool:
    """Reuse freed memory instead of giving it back, from now on; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, ARENAS), (_M_MMAP_THRESHOLD, MAPPED_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    refused = [name for name, value in settings if mallopt(name, value) != 1]
    return not refused
