"""The slices of a thread, as the kernel tells them."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable

import pytest

from server import timeslice
from server.timeslice import SLICE_NS, shorten

GET_ATTRIBUTES = 315
SHORT_SLICES_SINCE = (6, 12)


def in_a_thread(work: Callable[[], object]) -> object:
    """What this gives in a thread of its own: the test's own keeps its slices."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def slice_ns() -> int:
    attributes = ctypes.create_string_buffer(timeslice._ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(GET_ATTRIBUTES, 0, attributes, len(attributes), 0) == 0
    runtime = timeslice._ATTRIBUTES.unpack(attributes.raw)[5]
    assert isinstance(runtime, int)
    return runtime


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the call that reads slices")
def test_the_thread_that_asks_gets_short_slices_and_what_it_starts_does_not() -> None:
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release < SHORT_SLICES_SINCE:
        pytest.skip("this kernel has no slices to ask for")

    def own_and_child_s() -> tuple[bool, int, object]:
        return shorten(), slice_ns(), in_a_thread(slice_ns)

    found = in_a_thread(own_and_child_s)
    assert isinstance(found, tuple)
    assert found[:2] == (True, SLICE_NS)
    assert found[2] > SLICE_NS


def test_the_nice_level_stays() -> None:
    def change() -> int:
        # A thread's own: for Linux it is a process of that number.
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        shorten()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before

    assert in_a_thread(change) == 0


def test_a_machine_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "unheard-of")
    assert not shorten()
