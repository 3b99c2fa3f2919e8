"""The ways across a process border that bench/ring.py compares: the project's link, its rivals and a bare pipe.

Each forks a child that takes steps of 128 records and answers those that ask. Nobody polls: both sides sleep.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import pickle
import select
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink, ServerLink
from ipc.messages import Cancel

try:
    import zmq
except ImportError:
    HAS_ZMQ = False
else:
    HAS_ZMQ = True

STEP: Final = 128
SEED: Final = 7
# A side that hears nothing for so long has lost the other one.
LOST_S: Final = 30.0

Tuples = list[tuple[Any, ...]]
# Children share this process's links and queues without handing over descriptors.
fork = multiprocessing.get_context("fork")


def step_records(*, asks: bool) -> npt.NDArray[np.void]:
    """One step with fixed random contents; `asks`: its last record (flags) wants an answer."""
    rng = np.random.default_rng(SEED)
    records = np.zeros(STEP, TOKEN_DTYPE)
    records["slot"] = np.arange(STEP)
    records["token"] = rng.integers(0, 130_000, STEP)
    records["logprob"] = rng.random(STEP)
    records["position"] = rng.integers(0, 160_000, STEP)
    records["time_ns"] = 10**15
    records["flags"][-1] = asks
    return records


def step_tuples(*, asks: bool) -> Tuples:
    """The same as Python tuples; flags are the fourth field."""
    return list(step_records(asks=asks).tolist())


class Way(ABC):
    """One way across: this process publishes, a forked child takes and answers."""

    name: str
    bursts = True

    def __init__(self) -> None:
        """Only what the child needs too: it is forked before this process opens its own end (and gets threads)."""
        self._child = fork.Process(target=self.serve, daemon=True)
        self._child.start()

    @property
    def child_pid(self) -> int:
        """Process number of the child."""
        assert self._child.pid is not None
        return self._child.pid

    @abstractmethod
    def serve(self) -> None:
        """The child: take steps, answer those that ask, until it is ended."""

    @abstractmethod
    def open(self) -> None:
        """Open this process's end."""

    @abstractmethod
    def publish(self, *, asks: bool) -> None:
        """Send one step."""

    @abstractmethod
    def await_answer(self) -> None:
        """Sleep until the child answers."""

    def round_trips(self, steps: int) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.publish(asks=True)
            self.await_answer()
        return (time.perf_counter() - start) / steps

    def burst(self, steps: int) -> float:
        """Records a second."""
        start = time.perf_counter()
        for left in reversed(range(steps)):
            self.publish(asks=left == 0)
        self.await_answer()
        return steps * STEP / (time.perf_counter() - start)

    def close(self) -> None:
        """End the child."""
        self._child.terminate()
        self._child.join()
        self._child.close()


class Link(Way):
    """The project's own: shared-memory rings and doorbells."""

    name = "link"

    def __init__(self) -> None:
        self.server = ServerLink.create()
        super().__init__()

    def serve(self) -> None:
        link = self.server
        bell = select.poll()
        bell.register(link.fileno(), select.POLLIN)
        while True:
            records = link.drain(4096).records
            if len(records) and self.asks(records):
                link.send(Cancel(0, 0))
            if link.arm():
                bell.poll()
                link.acknowledge()

    def asks(self, records: npt.NDArray[np.void]) -> bool:
        """Whether the last of these records wants an answer."""
        return bool(records["flags"][-1])

    def open(self) -> None:
        self.engine = EngineLink.attach(self.server.fds)
        self.steps = {asks: step_records(asks=asks) for asks in (False, True)}

    def publish(self, *, asks: bool) -> None:
        while not self.engine.flush():
            self.engine.wait(LOST_S)
        self.engine.publish(self.steps[asks], [])

    def await_answer(self) -> None:
        while not self.engine.receive(64):
            self.engine.wait(LOST_S)

    def close(self) -> None:
        super().close()
        self.engine.close()
        self.server.close()


class LinkToTuples(Link):
    """The same, with every record made a Python tuple at the end."""

    name = "link to tuples"

    def asks(self, records: npt.NDArray[np.void]) -> bool:
        return bool(records.tolist()[-1][3])


class Queue(Way):
    """multiprocessing.Queue: pickle, a pipe and a feeder thread."""

    name = "multiprocessing.Queue"

    def __init__(self) -> None:
        self.steps_queue: multiprocessing.queues.Queue[Tuples] = fork.Queue()
        self.answers: multiprocessing.queues.Queue[tuple[int, int]] = fork.Queue()
        super().__init__()

    def serve(self) -> None:
        while True:
            if self.steps_queue.get()[-1][3]:
                self.answers.put((0, 0))

    def open(self) -> None:
        self.steps = {asks: step_tuples(asks=asks) for asks in (False, True)}

    def publish(self, *, asks: bool) -> None:
        self.steps_queue.put(self.steps[asks])

    def await_answer(self) -> None:
        self.answers.get(timeout=LOST_S)


class Zmq(Way):
    """A pair of ZeroMQ sockets over a socket file, with pickled tuples."""

    name = "zeromq pickle"

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"ipc://{Path(self.folder.name) / 'socket'}"
        super().__init__()

    def pack(self, *, asks: bool) -> bytes:
        """One step in bytes."""
        return pickle.dumps(self.steps[asks], pickle.HIGHEST_PROTOCOL)

    def asks(self, step: bytes) -> bool:
        """Unpack a step; whether it wants an answer."""
        return bool(pickle.loads(step)[-1][3])  # noqa: S301 - the rival's usual way; both ends are ours

    def serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.connect(self.address)
            while True:
                if self.asks(socket.recv()):
                    socket.send(b"answer")

    def open(self) -> None:
        self.steps = {asks: step_tuples(asks=asks) for asks in (False, True)}
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVTIMEO, int(LOST_S * 1000))
        self.socket.bind(self.address)

    def publish(self, *, asks: bool) -> None:
        self.socket.send(self.pack(asks=asks))

    def await_answer(self) -> None:
        self.socket.recv()

    def close(self) -> None:
        super().close()
        self.context.destroy(linger=0)
        self.folder.cleanup()


class ZmqBytes(Zmq):
    """The same sockets with the bytes of the record array."""

    name = "zeromq bytes"

    def pack(self, *, asks: bool) -> bytes:
        return self.records[asks].tobytes()

    def asks(self, step: bytes) -> bool:
        return bool(np.frombuffer(step, TOKEN_DTYPE)["flags"][-1])

    def open(self) -> None:
        super().open()
        self.records = {asks: step_records(asks=asks) for asks in (False, True)}


class Pipe(Way):
    """Two pipes and one byte: what waking each other costs, whatever is sent."""

    name = "pipe, one byte"
    bursts = False

    def __init__(self) -> None:
        self.there, self.back = os.pipe(), os.pipe()
        super().__init__()

    def serve(self) -> None:
        while True:
            os.write(self.back[1], os.read(self.there[0], 1))

    def open(self) -> None:
        pass

    def publish(self, *, asks: bool) -> None:
        os.write(self.there[1], b"1" if asks else b"0")

    def await_answer(self) -> None:
        os.read(self.back[0], 1)

    def close(self) -> None:
        super().close()
        for fd in (*self.there, *self.back):
            os.close(fd)
