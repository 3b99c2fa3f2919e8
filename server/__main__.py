"""`python -m server [flags]`: argv -> Config -> run. Exit status 2 is a configuration error."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Final, NoReturn

from server import log
from server.config import ConfigError, parse
from server.run import run

# Threads that idle end at once; one that is in a long text may take minutes.
PATIENCE_S: Final = 0.2


def main() -> int:
    """Parse, serve, report."""
    log.set_up()
    try:
        config, warnings = parse(sys.argv[1:])
        for warning in warnings:
            logging.getLogger("server").warning(warning)
        return run(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def leave(status: int) -> NoReturn:
    """End the process, also while a thread is in native code that cannot be told to stop.

    The interpreter's own end would not wait for such a thread either, but if the thread came back meanwhile, it would
    be unwound through frames that cannot be, and the process would abort.
    """
    deadline = time.monotonic() + PATIENCE_S
    left = [thread for thread in threading.enumerate() if thread.daemon]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
