"""What the prefix cache gives a request and what it takes from those beside it, through HTTP with a real engine.

hits    time to first token of a prompt of which all but a short tail is cached on the device or in host memory, against
        one of which nothing is
ranks   the same on two ranks: a hit on the rank that did not store it, while the other one decodes
        Ceiling of both: the factor by which less is computed; tail tokens attend to all before them, so each of them
        costs more than the average one of a miss. Promised: 0.6 of it.
beside  time between the tokens of running streams while pages are stored and loaded all the time, against the same
        computing without copies (`bench/caching/beside.py` says how it is made the same). Ceiling: no slower. Promised:
        at most 15 % slower, mean and median.

Medians over the rounds, sides in turns, fixed seed; a hit is compared with the misses next to it. A table and a line a
part; each starts its servers.

    python -m bench.cache_serving [--parts NAME ...] [--rounds N] [--tails N ...] [--window S] [--model FOLDER]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from bench.caching.beside import Load, compare
from bench.caching.calls import IDS, Calls, calls
from bench.caching.hits import Shape, one_rank, other_rank
from bench.report import report
from bench.streaming.server_process import ServerError, ServerProcess

NO_HOST: Final = 0.0


class Servers:
    """Starts servers of one model; all end with the stack."""

    def __init__(self, args: argparse.Namespace, stack: AsyncExitStack) -> None:
        self._args = args
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._count = 0

    async def start(self, *flags: str, blocks: int, host: float) -> Calls:
        """A client of a new server: `blocks` on each device, this share of the host memory a rank.

        Raises ServerError.
        """
        args, self._count = self._args, self._count + 1
        command = [sys.executable, "-m", "server", "--port", "0", "--engine", args.engine, "--routing", "least-loaded"]
        command += ["--num-kv-blocks", str(blocks), "--hicache-size-gb", f"{args.hicache_size_gb * host:.9f}", *flags]
        if args.model:
            command += ["--model", args.model]
        server = self._stack.enter_context(ServerProcess(command, {}, self._folder / f"log{self._count}"))
        await asyncio.to_thread(server.wait_ready)
        client = calls(f"http://{server.host}:{server.port}", range(args.first_id, args.last_id))
        return await self._stack.enter_async_context(client)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when a server failed, or did not reuse what it should."""
    args = _arguments(argv)
    try:
        for part in args.parts:
            report(f"cache_serving {part}", asyncio.run(_measure(part, args)))
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_serving", description="Hits, and decodes beside them.")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--model", default="", help="folder (default: the demo model)")
    parser.add_argument("--engine", default="native", help="as the server's flag")
    parser.add_argument("--first-id", type=int, default=IDS.start, help="prompts are random ids from this one")
    parser.add_argument("--last-id", type=int, default=IDS.stop, help="up to this one, exclusive")
    parser.add_argument("--hicache-size-gb", type=float, default=1.0, help="host memory of a part's servers together")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement")
    parser.add_argument("--pages", type=int, default=47, help="128-token pages that are cached, of hits and ranks")
    parser.add_argument("--tails", type=int, nargs="+", default=[64, 256], help="tokens behind them")
    parser.add_argument("--streams", type=int, default=2, help="that decode beside copies")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of one watch of them")
    args = parser.parse_args(argv)
    for name in ("rounds", "pages", "streams", "window"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)} is not above 0")
    if min(args.tails) < 1:
        parser.error(f"--tails {min(args.tails)} is below 1")
    return args


async def _measure(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        return await PARTS[part](Servers(args, stack), args)


async def _hits(servers: Servers, args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = Shape(args.pages, args.tails, args.rounds)
    return await one_rank(await servers.start(blocks=shape.blocks, host=1.0), shape)


async def _ranks(servers: Servers, args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = Shape(args.pages, args.tails, args.rounds)
    return await other_rank(await servers.start("--dp", "2", blocks=shape.busy_blocks, host=0.5), shape)


async def _beside(servers: Servers, args: argparse.Namespace) -> list[dict[str, Any]]:
    load = Load(args.streams, new_pages=1, conversations=4, pages=12, tail=8, window_s=args.window, rounds=args.rounds)
    copies = await servers.start(blocks=load.small_device, host=0.5)
    on_device = await servers.start(blocks=load.large_device, host=0.5)
    no_cache = await servers.start(blocks=load.small_device, host=NO_HOST)
    return await compare(copies, on_device, no_cache, load)


PARTS: Final[dict[str, Callable[[Servers, argparse.Namespace], Awaitable[list[dict[str, Any]]]]]] = {
    "hits": _hits,
    "ranks": _ranks,
    "beside": _beside,
}


if __name__ == "__main__":
    sys.exit(main())
