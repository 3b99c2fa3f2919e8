"""`python -m server [flags]`: argv -> Config -> run. Exit status 2 is a configuration error."""

from __future__ import annotations

import logging
import sys

from server import log
from server.config import ConfigError, parse
from server.run import run


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


if __name__ == "__main__":
    sys.exit(main())
