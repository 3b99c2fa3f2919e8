"""How late the server's loop runs while long prompts arrive beside running streams, as its own second watcher notes it.

Streams of a fake engine run at a fixed pace; then bursts of long prompts, each never seen before, arrive at once, and
the same prompts come back one turn longer. Only what the watcher noted during a burst counts. `on the loop` is the same
load with `tokenizers` called on the loop, as a server without threads does.

Ceiling: the watcher wakes every millisecond, so a quiet loop shows some hundredths of one. Client, engine, encoder and
loop share the machine's cores: with too few of them, part of the lateness is the kernel's. `busy` is the processor time
that the loop itself took between two wakings: how late it would be with a core of its own.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import numpy.typing as npt

from bench.encoding.conversation import Conversation
from bench.encoding.steps import CHARACTERS_PER_TOKEN
from bench.streaming.server_process import ServerProcess

STREAMS: Final = 64
PROMPTS: Final = 8
STEP_MS: Final = 20
TIMEOUT: Final = aiohttp.ClientTimeout(total=600)
WAYS: Final = {
    "off the loop": ([], ["--tokenizer-backend", "auto"]),
    "on the loop": (["--on-loop"], ["--tokenizer-backend", "hf"]),
}

Row = dict[str, object]
Window = tuple[float, float]


def rows(model: Path, tokens: int, bursts: int) -> list[Row]:
    """A row for each way and turn."""
    return [row for way in WAYS for row in _way_rows(model, way, tokens, bursts)]


def _way_rows(model: Path, way: str, tokens: int, bursts: int) -> list[Row]:
    mode, flags = WAYS[way]
    notes = model.parent / "lag.npy"
    argv = [
        sys.executable, "-m", "bench.encoding.lag_server", str(notes), *mode, "--", "--model", str(model), "--engine",
        "fake", "--port", "0", "--num-kv-blocks", "65536", "--max-num-batched-tokens", str(2**22),
        "--log-interval-steps", "0", "--shutdown-timeout", "1", *flags,
    ]  # fmt: skip
    with ServerProcess(argv, {"DEEPINFER_FAKE_STEP_MS": str(STEP_MS)}, model.parent / "lag.log") as server:
        server.wait_ready()
        windows = asyncio.run(_load(f"http://{server.host}:{server.port}", tokens, bursts))
    found = np.load(notes)
    return [
        {"part": "lag", "way": way, "turn": turn, "streams": STREAMS, "prompts": PROMPTS, **_late(found, windows[turn])}
        for turn in windows
    ]


def _late(found: npt.NDArray[np.float64], windows: Sequence[Window]) -> Row:
    inside = np.zeros(len(found), bool)
    for start, end in windows:
        # A nap that ended after the burst began in it.
        inside |= (found[:, 0] >= start) & (found[:, 0] - found[:, 1] <= end)
    late, busy = 1e3 * found[inside, 1], 1e3 * found[inside, 2]
    return {
        "lag_p50_ms": float(np.quantile(late, 0.5)),
        "lag_p99_ms": float(np.quantile(late, 0.99)),
        "lag_max_ms": float(late.max()),
        "busy_p99_ms": float(np.quantile(busy, 0.99)),
        "busy_max_ms": float(busy.max()),
        "burst_s": sum(end - start for start, end in windows) / len(windows),
    }


async def _load(url: str, tokens: int, bursts: int) -> dict[str, list[Window]]:
    windows: dict[str, list[Window]] = {"cold": [], "following": []}
    async with aiohttp.ClientSession(url, timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        started = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(_stream(session, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        for burst in range(bursts):
            conversations = [Conversation(seed=1000 + burst * PROMPTS + number) for number in range(PROMPTS)]
            for conversation in conversations:
                conversation.grow(int(tokens * CHARACTERS_PER_TOKEN))
            for noted in windows.values():
                bodies = [conversation.body() for conversation in conversations]
                start = time.monotonic()
                await asyncio.gather(*(_post(session, body) for body in bodies))
                noted.append((start, time.monotonic()))
                for conversation in conversations:
                    conversation.turn()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return windows


async def _stream(session: aiohttp.ClientSession, started: asyncio.Event) -> None:
    body = {"prompt": list(range(16)), "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            started.set()


async def _post(session: aiohttp.ClientSession, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post("/v1/chat/completions", data=body, headers=headers) as response:
        response.raise_for_status()
        await response.read()
