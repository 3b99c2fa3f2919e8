"""The usual shape of a serving frontend: FastAPI on uvicorn, a queue and a generator per request, pickled steps.

Serves the streamed and whole forms of `/v1/completions` and `/v1/chat/completions` over one rank of the fake engine.
Written as such servers are, and as well as the shape allows: uvloop and httptools where installed, one wake-up of the
loop per step, text by two `tokenizer.decode` calls a token, plain integers for counters.

    python -m bench.baselines.fastapi_server --model FOLDER [--port N] [--max-num-seqs N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from bench.baselines.counters import Counters
from bench.baselines.queue_client import QueueEngine
from bench.baselines.queue_engine import launch
from bench.baselines.window_text import WindowText
from ipc.messages import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 900  # as our server's
REASONS: Final = {Finish.NONE: None, Finish.STOP: "stop", Finish.LENGTH: "length"}

# A choice's content: (new text, finish reason) -> the JSON value of `choices[0]`.
Choice = Callable[[str, str | None], dict[str, Any]]


class Sampled(BaseModel):
    """What both endpoints take."""

    model: str = ""
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    prompt: str | list[int]


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]


class Frontend:
    """The two endpoints over one engine."""

    def __init__(self, model: str, engine: QueueEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.counters = Counters()
        self._model = model
        self._engine = engine
        self._tokenizer = tokenizer

    async def completions(self, body: CompletionBody) -> Response:
        """Text or ids as they are."""
        ids = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        return await self._answer(body, ids, "text_completion", _text_choice)

    async def chat(self, body: ChatBody) -> Response:
        """Messages through the chat template."""
        text = self._tokenizer.apply_chat_template(body.messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return await self._answer(body, ids, "chat.completion", _message_choice)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    async def _answer(self, body: Sampled, ids: list[int], kind: str, choice: Choice) -> Response:
        head = {"id": f"cmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": self._model}
        if body.stream:
            head["object"] = kind if kind == "text_completion" else f"{kind}.chunk"
            choice = choice if kind == "text_completion" else _delta_choice
            return StreamingResponse(self._events(body, ids, head, choice), media_type="text/event-stream")
        pieces = [piece async for piece in self._pieces(body, ids)]
        whole = choice("".join(text for text, _ in pieces), pieces[-1][1])
        return JSONResponse({**head, "object": kind, "choices": [whole]})

    async def _events(self, body: Sampled, ids: list[int], head: dict[str, Any], choice: Choice) -> AsyncIterator[str]:
        async for text, reason in self._pieces(body, ids):
            chunk = {**head, "choices": [choice(text, reason)]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def _pieces(self, body: Sampled, ids: list[int]) -> AsyncIterator[tuple[str, str | None]]:
        """(text, finish reason) for every token."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        number, tokens = self._engine.submit(ids, body.max_tokens, body.temperature, seed, ignore_eos=body.ignore_eos)
        text = WindowText(self._decode)
        finish = int(Finish.NONE)
        try:
            while finish == Finish.NONE:
                token, finish = await tokens.get()
                if finish == Finish.ERROR:
                    raise HTTPException(400, "the engine refused this prompt")
                self.counters.completion_tokens += 1
                yield text.push(token), REASONS[Finish(finish)]
        finally:
            self._engine.forget(number, ended=finish != Finish.NONE)


def _text_choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _message_choice(text: str, reason: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def _delta_choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}


def build(frontend: Frontend, engine: QueueEngine, address: str) -> FastAPI:
    """The application; it prints `ready: ADDRESS` once the engine runs."""

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(engine.start, asyncio.get_running_loop())
        watcher = asyncio.create_task(frontend.counters.watch_lag())
        print(f"ready: {address}", flush=True)
        yield
        watcher.cancel()
        await asyncio.to_thread(engine.stop)

    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(frontend.counters.expose())

    app = FastAPI(lifespan=life)
    app.post("/v1/completions", response_model=None)(frontend.completions)
    app.post("/v1/chat/completions", response_model=None)(frontend.chat)
    app.get("/deepinfer/metrics", response_model=None)(metrics)
    return app


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.baselines.fastapi_server", description="The baseline.")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="sequences running at once")
    args = parser.parse_args()
    # It advises to install PyTorch, of which a tokenizer has no need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    engine = QueueEngine(launch(args.model, args.max_num_seqs))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model, local_files_only=True)
    frontend = Frontend(Path(args.model).resolve().name, engine, tokenizer)
    with socket.create_server(("127.0.0.1", args.port), backlog=BACKLOG) as listener:
        app = build(frontend, engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S
        )
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
