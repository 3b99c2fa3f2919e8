"""`python -m engine LAUNCH`: one rank. Attaches to the link it inherited, builds its engine, runs the loop.

The server starts this; it is not meant for hands. It dies with the server (PR_SET_PDEATHSIG), answers SIGTERM
by leaving the loop, and reports why it cannot go on as a `Failed` event before it exits with 1. Status 2 is a LAUNCH
that cannot be read.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from typing import Final

import msgspec
import numpy as np

from engine.handshake import await_pool
from engine.loop import RankLoop
from engine.protocol import Engine, StartError
from hicache.pool import HostPool
from hicache.shape import PoolShape
from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink
from ipc.messages import Failed, Launch, Ready

log = logging.getLogger("engine")

_PR_SET_PDEATHSIG: Final = 1
# How often a compute thread looks for its peers before it sleeps: some microseconds. By default it spins for
# milliseconds, hundreds of times a step, on a core that its peer may need when other processes are about: a busy
# neighbour made tokens 15 times slower that way, two to three times this way. On a quiet machine it costs a few
# percent.
SPINS: Final = "3000"


def main(argv: list[str]) -> int:
    """Run one rank to its end; the exit status is 0 only after an orderly shutdown."""
    if len(argv) != 2:
        print(f"error: one LAUNCH argument is expected, got {len(argv) - 1}", file=sys.stderr)
        return 2
    try:
        launch = msgspec.json.decode(argv[1], type=Launch)
    except msgspec.MsgspecError as error:
        print(f"error: LAUNCH cannot be read: {error}", file=sys.stderr)
        return 2
    _die_with(launch.parent_pid)
    # The terminal's Ctrl-C is for the server, which ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank{launch.rank} %(name)s: %(message)s")
    link = EngineLink.attach(launch.link)
    link.beat(0, EngineState.LOADING)
    try:
        _serve(launch, link)
    except StartError as error:
        _tell(link, Failed(str(error)))
        return 1
    except Exception as error:
        log.exception("rank %d cannot go on", launch.rank)
        _tell(link, Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _serve(launch: Launch, link: EngineLink) -> None:
    engine, pool = _build(launch), None
    try:
        loop = RankLoop(engine, link, launch.log_interval_steps)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        if launch.pool is not None:
            sizes = await_pool(link, engine.facts, lambda: loop.stopped)
            if sizes is None:
                return
            pool = HostPool.attach(launch.pool, PoolShape.of(sizes))
            engine.attach(pool)
        # What is loaded stays: a collection that walks all of the model's libraries is a pause in every answer.
        gc.collect()
        gc.freeze()
        _tell(link, Ready(engine.facts))
        loop.run()
    finally:
        engine.close()
        if pool is not None:
            pool.close()


def _build(launch: Launch) -> Engine:
    if launch.engine == "fake":
        from engine.fake import FakeEngine

        return FakeEngine(launch)
    # Read by torch's OpenMP as it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    # Imported late: torch takes seconds, and a fake rank must not pay them.
    from engine.native.engine import NativeEngine

    return NativeEngine(launch)


def _tell(link: EngineLink, event: Ready | Failed) -> None:
    link.publish(np.empty(0, TOKEN_DTYPE), [event])


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent, and check that the parent did not die before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
