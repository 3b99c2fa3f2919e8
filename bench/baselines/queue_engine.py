"""One engine process behind two `multiprocessing.Queue`s: commands in, a list of tuples per step out.

Runs the same fake engine as `python -m engine` and publishes every step at once. It ends with its parent. Knows
nothing about HTTP or text.
"""

from __future__ import annotations

import multiprocessing
import queue
from typing import TYPE_CHECKING, Final

from engine.fake import FakeEngine
from engine.protocol import RequestRefusedError
from ipc.messages import Cancel, Finish, Launch, LinkFds, Submit

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

Command = Submit | Cancel | None  # None: leave the loop
Item = tuple[int, int, int]  # request, token, ipc.messages.Finish

NO_TOKEN: Final = -1
# A parent that was killed cannot say goodbye; an idle engine looks for it this often.
PARENT_CHECK_S: Final = 1.0
NO_LINK: Final = LinkFds(-1, -1, -1)  # the rings of `ipc` have no part in this shape


def launch(model: str, max_num_seqs: int) -> Launch:
    """What the engine is told: the fields a queue-fed engine has a use for."""
    return Launch(0, 1, "fake", model, NO_LINK, parent_pid=0, max_num_seqs=max_num_seqs)


def serve(told: Launch, commands: Queue[Command], steps: Queue[list[Item]]) -> None:
    """Loop until None arrives or the parent is gone. The first thing published is an empty step: ready."""
    engine = FakeEngine(told)
    steps.put([])
    while True:
        while not engine.has_work() or not commands.empty():
            try:
                command = commands.get(timeout=PARENT_CHECK_S)
            except queue.Empty:
                if _orphaned():
                    return
                continue
            if command is None:
                return
            _obey(engine, command, steps)
        records = engine.step().records
        # Columns first: far cheaper than reading a numpy record field by field.
        columns = (records[name].tolist() for name in ("slot", "token", "finish"))
        steps.put(list(zip(*columns, strict=True)))


def _obey(engine: FakeEngine, command: Submit | Cancel, steps: Queue[list[Item]]) -> None:
    if isinstance(command, Cancel):
        engine.cancel(command.slot, command.generation)
        return
    try:
        engine.add(command)
    except RequestRefusedError:
        steps.put([(command.slot, NO_TOKEN, int(Finish.ERROR))])


def _orphaned() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
