"""`python -m server` with a second watcher of its loop, which writes how late it was, and when, to a file at the end.

python -m bench.encoding.lag_server FILE [--on-loop] -- FLAGS OF THE SERVER
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from server import run as server_run
from server.config import parse
from server.keys import Keys
from server.log import set_up
from server.tokenizer.backend import HfBackend

INTERVAL_S: Final = 0.001
EVERYTHING: Final = 2**40


Note = tuple[float, float, float]


async def watch(found: list[Note]) -> None:
    """Sleep and note (time of waking, seconds late, seconds of processor the loop took meanwhile) for ever."""
    while True:
        due, used = time.monotonic() + INTERVAL_S, time.thread_time()
        await asyncio.sleep(INTERVAL_S)
        now = time.monotonic()
        found.append((now, max(0.0, now - due), time.thread_time() - used))


async def main(file: Path, *, on_loop: bool, flags: list[str]) -> int:
    """Serve until a signal."""
    if on_loop:  # the contrast: no text is too long for the loop
        HfBackend.inline_characters = EVERYTHING  # type: ignore[misc]
    config, _ = parse(flags)
    found: list[Note] = []
    watcher = asyncio.create_task(watch(found))
    try:
        return await server_run._serve(config.named(config.model), Keys((), None), None)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        np.save(file, np.array(found))


if __name__ == "__main__":
    set_up()
    split = sys.argv.index("--")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(
            runner.run(main(Path(sys.argv[1]), on_loop="--on-loop" in sys.argv[2:split], flags=sys.argv[split + 1 :]))
        )
