"""`POST /v1/completions`: text or token ids, one prompt or many, no chat template.

Streams one chunk a token, with text or without: benchmark clients time every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from server.answer import Usage, answer
from server.body import read
from server.envelope import Envelope
from server.errors import InvalidRequestError
from server.fields import CompletionRequest
from server.generate import Generation, Piece
from server.logprobs import text_logprobs
from server.services import REQUEST_ID, SERVICES, Call, Services
from server.tokenizer.load import TextTokenizer

# Prompts of one request: each takes a slot, so one request must not take them all.
MAX_PROMPTS: Final = 256

Ids = npt.NDArray[np.int32]


async def completions(request: web.Request) -> web.StreamResponse:
    """Tokenize what is text, submit every prompt, answer."""
    services = request.app[SERVICES]
    call = Call(request[REQUEST_ID], "completions", "prompt")
    body = await read(request, CompletionRequest)
    services.check_model(body.model)
    with services.metrics.encode.time():
        prompts = [await _encoded(services, prompt) for prompt in _prompts(body.prompt)]
    generations = _start_all(services, call, prompts, body)
    form = TextForm(call.request_id, services.config.model_name, services.tokenizer, logprobs=body.logprobs is not None)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return await answer(request, generations, form, stream=body.stream, include_usage=include_usage)


def _start_all(services: Services, call: Call, prompts: Sequence[Ids], body: CompletionRequest) -> list[Generation]:
    """All prompts or none: a refusal of one takes back those before it."""
    logprobs = -1 if body.logprobs is None else body.logprobs
    with ExitStack() as started:
        generations = [
            started.enter_context(services.start(call, ids, body, body.max_tokens, logprobs)) for ids in prompts
        ]
        started.pop_all()
    return generations


def _prompts(prompt: str | list[Any]) -> list[str | Ids]:
    """The four shapes of `prompt` as a list of texts or id arrays. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt: the list is empty", "prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: {len(prompt)} prompts, at most {MAX_PROMPTS} are served at once", "prompt")
    return [one if isinstance(one, str) else _ids(one, f"prompt[{index}]") for index, one in enumerate(prompt)]


def _ids(prompt: object, field: str) -> Ids:
    try:
        return np.array(msgspec.convert(prompt, list[int]), np.int32)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidRequestError(f"{field}: expected text or a list of token ids ({error})", "prompt") from None


async def _encoded(services: Services, prompt: str | Ids) -> Ids:
    if isinstance(prompt, str):
        return await services.encode(prompt, "prompt", add_special_tokens=True)
    return prompt


class TextForm:
    """`text_completion` objects of one request."""

    def __init__(self, request_id: str, model: str, tokenizer: TextTokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._envelope = Envelope(f"cmpl-{request_id}", "text_completion", "text_completion", model)
        self._sent: dict[int, int] = {}  # characters of each choice so far, for text_offset

    def opening(self, index: int) -> bytes:
        """Nothing comes before the first token."""
        self._sent[index] = 0
        return b""

    def events(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """One chunk a token."""
        return b"".join(self._piece(index, piece) for piece in pieces)

    def usage_event(self, usage: Usage) -> bytes:
        """The `choices: []` chunk."""
        return self._envelope.usage_event(usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The `text_completion` object."""
        return self._envelope.document([self._choice(*numbered) for numbered in enumerate(choices)], usage)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": text_logprobs(self._tokenizer, pieces, 0) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _piece(self, index: int, piece: Piece) -> bytes:
        logprobs = b"null"
        if self._logprobs:
            logprobs = msgspec.json.encode(text_logprobs(self._tokenizer, [piece], self._sent[index]))
            self._sent[index] += len(piece.text)
        text = b'"text":' + msgspec.json.encode(piece.text)
        return self._envelope.chunk(index, text, logprobs, piece.finish_reason)
