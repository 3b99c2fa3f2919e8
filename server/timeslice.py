"""How long the kernel lets the loop's thread run at a time: short slices, so that it is soon let in again.

The scheduler prefers whoever asked for less at a time, among those that have had no more than their share. A loop that
wakes for a moment need not wait then until an encoder or an engine has had its milliseconds. It takes no larger share
and needs no rights. Knows nothing about requests.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

# The least that Linux grants (since 6.12; older ones ignore it).
SLICE_NS: Final = 100_000
# sched_setattr, which the C library does not have everywhere.
_SYSCALLS: Final = {"x86_64": 314, "aarch64": 274}
# Threads and processes that this one starts get the usual slices.
_RESET_ON_FORK: Final = 1
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")


def shorten(slice_ns: int = SLICE_NS) -> bool:
    """For the calling thread, from now on; False where the machine has no such setting or its policy is another."""
    number = _SYSCALLS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, wanted, 0) == 0)
