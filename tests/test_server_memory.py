"""Freed memory is reused instead of being given back and zeroed again, in every thread."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, threading
from server.memory import keep_memory

SIZE, BLOCKS, TURNS = 2**20, 16, 50
assert keep_memory()

def take() -> None:
    [bytes(SIZE) for _ in range(BLOCKS)]  # all at once, and gone

def work() -> None:
    take()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(TURNS):
        take()
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

found: list[int] = []
work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(max(found) * resource.getpagesize() / SIZE / BLOCKS / TURNS)
"""


def test_blocks_of_a_megabyte_are_not_mapped_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.2, "the share of pages that were new"
