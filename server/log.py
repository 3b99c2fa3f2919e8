"""Log set-up: one line an event on stderr, `key=value` where a line is meant for machines."""

from __future__ import annotations

import logging
import re
from typing import Final

_PLAIN: Final = re.compile(r"[^\s\"'=\\]+")


def set_up() -> None:
    """Send this process's log to stderr."""
    # No line shows them, and they are looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # One line per request is ours (`account.py`); aiohttp's would be a second one.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def line(**pairs: object) -> str:
    """`key=value` pairs; a value with spaces, quotes or control characters is quoted and escaped."""
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in pairs.items())


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.isprintable() else repr(text)
