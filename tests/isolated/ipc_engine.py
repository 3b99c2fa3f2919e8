"""An engine without a model. argv: echo|source|own, then what `main` reads for each.

echo    link fds: answers each Cancel with one record of its slot and generation; leaves at Shutdown.
source  link fds, submit, event and token capacity, count, seed: publishes `count` numbered records in random steps with
        random stalls, now and then with an event that carries the number of the record it precedes; leaves at Shutdown.
own     nothing: creates a link of its own, attaches to it, prints the segment's inode and sleeps, to be killed.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink, ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import Cancel, Flag, LinkFds, Shutdown, Stats

# Far above any pass of the test: a wait that lasts so long has lost its wake-up.
LOST_S = 20.0


def echo(fds: LinkFds) -> int:
    link = EngineLink.attach(fds)
    step = 0
    while True:
        started = time.monotonic()
        link.wait(LOST_S)
        if time.monotonic() - started >= LOST_S:
            return 3
        commands = link.receive(64)
        step += 1
        link.beat(step, EngineState.STEPPING)
        answers = [command for command in commands if isinstance(command, Cancel)]
        records = np.zeros(len(answers), TOKEN_DTYPE)
        records["slot"] = [answer.slot for answer in answers]
        records["generation"] = [answer.generation for answer in answers]
        link.publish(records, [])
        if any(isinstance(command, Shutdown) for command in commands):
            return 0


def source(fds: LinkFds, shape: LinkShape, count: int, seed: int) -> int:
    link = EngineLink.attach(fds, shape)
    rng = np.random.default_rng(seed)
    sent = stalls = 0
    while sent < count:
        if not link.flush():
            stalls += 1
            link.wait(1.0)
            continue
        size = min(int(rng.integers(1, 300)), count - sent)
        records = np.zeros(size, TOKEN_DTYPE)
        number = np.arange(sent, sent + size)
        records["token"], records["position"], records["time_ns"] = number, number * 7 % 2**32, number * 2654435761
        marked = rng.integers(size, size=int(rng.integers(0, 4)))
        records["flags"][marked] = Flag.TOP
        link.publish(records, [Stats(0, 0, 0, 0, sent + int(at), 0, 0, 0) for at in marked])
        sent += size
        if rng.random() < 0.01:
            time.sleep(rng.random() * 0.003)
    while not link.flush():
        link.wait(1.0)
    while not any(isinstance(command, Shutdown) for command in link.receive(8)):
        link.wait(LOST_S)
    print(stalls)
    link.close()
    return 0


def own() -> int:
    server = ServerLink.create()
    engine = EngineLink.attach(server.fds)
    engine.publish(np.zeros(10, TOKEN_DTYPE), [])
    print(os.fstat(server.fds.segment).st_ino, flush=True)
    time.sleep(LOST_S)
    return 0


def main(mode: str, *numbers: int) -> int:
    if mode == "own":
        return own()
    fds = LinkFds(*numbers[:3])
    if mode == "echo":
        return echo(fds)
    return source(fds, LinkShape(*numbers[3:6]), *numbers[6:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
