"""The server ends in bounded time with a text in its encoder's hands that is never done."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Final

import aiohttp

from server.tokenizer.fast import INLINE_CHARACTERS
from tests.byte_tokenizer import write_model
from tests.isolated.endless_encode import ENDLESS
from tests.serving import DEADLINE_S, RunningServer, eventually

TEXT: Final = "/v1/completions"
LONG: Final = "x" * INLINE_CHARACTERS


async def test_a_text_that_is_never_done_does_not_keep_the_server(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    flags = ("--tokenizer-backend", "fastokens", "--shutdown-timeout", "3600")
    with RunningServer(model, *flags, program="tests.isolated.endless_encode") as server:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(server.address, timeout=timeout) as client:
            asked = asyncio.create_task(client.post(TEXT, json={"prompt": ENDLESS + LONG, "max_tokens": 1}))
            await asyncio.to_thread(eventually, lambda: ENDLESS in server.log(), "the text is being encoded")
            server.process.send_signal(signal.SIGTERM)
            async with await asked as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "shutting_down"
        assert await asyncio.to_thread(server.process.wait, DEADLINE_S) == 0
        assert "Traceback" not in server.log()
