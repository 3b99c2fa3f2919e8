"""Whether the prefix cache may be used: off, starting, on, or disabled for good after three faults.

The border around what can fail in the cache: an exception there is logged with its traceback, counts as a fault, and
costs a request its cached tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# One fault may be bad luck; after three the memory, a rank or we cannot be trusted with what people asked.
MAX_FAULTS: Final = 3


class State(StrEnum):
    """Whether prompts are looked up."""

    OFF = "off"
    STARTING = "starting"  # no rank has told the size of its pages yet
    ON = "on"
    DISABLED = "disabled"  # by faults, until the server is started again


class Trust:
    """One cache's state and its faults."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.faults = 0
        self.reason = ""  # why it is disabled
        self.on_disabled: Callable[[], None] = lambda: None

    def fault(self, what: str) -> None:
        """Something went wrong with cached pages; too often, and nobody gets any again."""
        self.faults += 1
        log.error("prefix cache fault %d of %d: %s", self.faults, MAX_FAULTS, what)
        if self.faults >= MAX_FAULTS and self.state is not State.DISABLED:
            self.state = State.DISABLED
            self.reason = f"{MAX_FAULTS} faults, the last: {what}"
            log.critical("the prefix cache is disabled until the server is started again: %s", self.reason)
            self.on_disabled()

    def guarded(self, what: str, call: Callable[[], T]) -> T | None:
        """The call's result; None where it raised."""
        try:
            return call()
        except Exception as error:  # the cache's border: requests go on without it
            log.exception("the prefix cache failed at %s", what)
            self.fault(f"{what}: {type(error).__name__}: {error}")
            return None

    def as_json(self) -> dict[str, str | None]:
        """For `/health`."""
        return {"state": str(self.state), "reason": self.reason or None}
