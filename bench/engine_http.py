"""The native engine through HTTP: output tokens a second at 1, 8 and 32 clients, each prompt different.

Measures what a user of the demo model gets: streamed completions of random prompts of 226 ids, 64 tokens each, greedy,
`ignore_eos`; prefill and decode share the step. Ceiling: `bench/engine.py`'s decode at the same batch, without prompts.
Fixed seed; one round per client count, after a warm-up request.

    python -m bench.engine_http [--clients N ...] [--dtype float32]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp

from bench.caching.calls import next_token
from bench.report import report
from bench.streaming.server_process import ServerError, ServerProcess

PROMPT_TOKENS: Final = 226
OUTPUT_TOKENS: Final = 64
# Ids that every demo vocabulary has, none of them special.
FIRST_ID, LAST_ID = 1000, 40000
ROUNDS: Final = {1: 3, 8: 2, 32: 1}  # requests of each client, so that the counts come near each other
TIMEOUT_S: Final = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when the server failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_http", description="The engine through HTTP.")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="clients at once, one run each")
    parser.add_argument("--dtype", default="float32", help="as the server's flag")
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "server", "--port", "0", "--dtype", args.dtype]
    try:
        with tempfile.TemporaryDirectory() as folder, ServerProcess(command, {}, Path(folder) / "log") as server:
            server.wait_ready()
            report("engine_http", asyncio.run(_rows(f"http://{server.host}:{server.port}", args.clients)))
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _rows(address: str, clients: Sequence[int]) -> list[dict[str, object]]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    draw = random.Random(1)
    async with aiohttp.ClientSession(address, timeout=timeout) as session:
        await _ask(session, draw)
        return [await _run(session, draw, count) for count in clients]


async def _run(session: aiohttp.ClientSession, draw: random.Random, clients: int) -> dict[str, object]:
    rounds = ROUNDS.get(clients, 1)

    async def client() -> list[float]:
        return [await _ask(session, draw) for _ in range(rounds)]

    started = time.perf_counter()
    firsts = [first for found in await asyncio.gather(*(client() for _ in range(clients))) for first in found]
    seconds = time.perf_counter() - started
    return {
        "clients": clients,
        "requests": len(firsts),
        "output tok/s": len(firsts) * OUTPUT_TOKENS / seconds,
        "total tok/s": len(firsts) * (PROMPT_TOKENS + OUTPUT_TOKENS) / seconds,
        "mean TTFT s": sum(firsts) / len(firsts),
    }


async def _ask(session: aiohttp.ClientSession, draw: random.Random) -> float:
    """One streamed answer to its end; returns the seconds to its first token."""
    body = {
        "prompt": [draw.randint(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.perf_counter()
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        await next_token(answer.content)
        first = time.perf_counter() - started
        await answer.read()
    return first


if __name__ == "__main__":
    sys.exit(main())
