"""How a rank gets its host pool: it says what it has loaded, and waits until the server knows the pool's size.

Promises a heartbeat all the while, and to leave when it is told to. Nothing else is asked of a rank before it is
ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from ipc.errors import CodecError
from ipc.heartbeat import EngineState
from ipc.layout import TOKEN_DTYPE
from ipc.link import EngineLink
from ipc.messages import CacheAttach, Command, Facts, Loaded, Shutdown

log = logging.getLogger(__name__)

# A rank that waits still shows a heartbeat this often.
WAIT_BEAT_S: Final = 1.0
COMMANDS_PER_LOOK: Final = 16


def await_pool(link: EngineLink, facts: Facts, stopped: Callable[[], bool]) -> CacheAttach | None:
    """The sizes of the host pool, once the server has set them. None: the rank is to leave instead."""
    link.publish(np.empty(0, TOKEN_DTYPE), [Loaded(facts)])
    while not stopped():
        link.beat(0, EngineState.LOADING)
        link.flush()
        for command in _commands(link):
            if isinstance(command, CacheAttach):
                return command
            if isinstance(command, Shutdown):
                return None
            log.warning("%s came before the host pool and is ignored", type(command).__name__)
        link.wait(WAIT_BEAT_S)
    return None


def _commands(link: EngineLink) -> list[Command]:
    try:
        return link.receive(COMMANDS_PER_LOOK)
    except CodecError:
        log.exception("a command could not be read")
        return []
