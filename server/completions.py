"""`POST /v1/completions`: text or token ids, one prompt or many, no chat template.

Streams one chunk a token, with text or without: benchmark clients time every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from server.account import Call
from server.affinity import PREFIX_CHARS, session_key
from server.answer import answer
from server.body import read
from server.envelope import Envelope, Usage
from server.errors import ContextLengthError, InvalidRequestError
from server.events import EventWriter
from server.fields import CompletionRequest
from server.form import Form
from server.generate import Piece
from server.logprobs import text_logprobs
from server.services import CALL, SERVICES, Asked, Ids, Services

# Prompts of one request: a bound before any of them is tokenized; what they ask for is bounded by `services.py`.
MAX_PROMPTS: Final = 256


async def completions(request: web.Request) -> web.StreamResponse:
    """Tokenize what is text, submit every prompt, answer."""
    services = request.app[SERVICES]
    call = request[CALL]
    body = await read(request, CompletionRequest)
    services.check_model(body.model)
    manner = services.manner(body)
    with services.metrics.encode.time():
        prompts = [await _encoded(services, prompt) for prompt in _prompts(services, body.prompt)]
    logprobs = -1 if body.logprobs is None else body.logprobs
    session = session_key(request.headers, _first_words(body.prompt))
    generations = services.generations(Asked(call, "prompt", session, body.max_tokens, logprobs), prompts, body)
    return await answer(request, generations, TextForm(services, call, logprobs=logprobs >= 0), manner)


def _first_words(prompt: str | list[Any]) -> str:
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else repr(prompt[:PREFIX_CHARS])


def _prompts(services: Services, prompt: str | list[Any]) -> list[str | Ids]:
    """The four shapes of `prompt` as a list of texts or id arrays. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt: the list is empty", "prompt")
    if isinstance(prompt[0], int):
        return [_ids(services, prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: {len(prompt)} prompts, at most {MAX_PROMPTS} are served at once", "prompt")
    return [
        one if isinstance(one, str) else _ids(services, one, f"prompt[{index}]") for index, one in enumerate(prompt)
    ]


def _ids(services: Services, prompt: object, field: str) -> Ids:
    limit = services.submitter.facts.max_model_len
    if isinstance(prompt, list) and len(prompt) >= limit:  # known before millions of ids are looked at
        raise ContextLengthError(len(prompt), limit, "prompt")
    try:
        return np.array(msgspec.convert(prompt, list[int]), np.int32)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidRequestError(f"{field}: expected text or a list of token ids ({error})", "prompt") from None


async def _encoded(services: Services, prompt: str | Ids) -> Ids:
    if isinstance(prompt, str):
        return await services.encode(prompt, "prompt", add_special_tokens=True)
    return prompt


class TextForm(Form):
    """`text_completion` objects of one request."""

    def __init__(self, services: Services, call: Call, *, logprobs: bool) -> None:
        model = services.config.served_model_name
        envelope = Envelope(f"cmpl-{call.request_id}", "text_completion", "text_completion", model)
        super().__init__(services, envelope, logprobs=logprobs)
        self._sent: dict[int, int] = {}  # characters of each choice so far, for text_offset

    def opening(self, index: int) -> bytes:
        """Nothing comes before the first token."""
        self._sent[index] = 0
        return b""

    def last(self, index: int, text: str, finish_reason: str) -> bytes:
        """The chunk with the finish reason."""
        return self._envelope.chunk(index, _text(text), finish_reason=finish_reason)

    def _text_writer(self, index: int) -> EventWriter:
        return self._writers.writer(*self._envelope.around(index, b'"text":', b""), skip_empty=False)

    def _shows(self, piece: Piece) -> bool:
        return True  # clients time every token

    def _chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        logprobs = b"null"
        if self._logprobs:
            logprobs = msgspec.json.encode(text_logprobs(self._tokenizer, [piece], self._sent[index]))
            self._sent[index] += len(piece.text)
        return self._envelope.chunk(
            index, _text(piece.text), logprobs=logprobs, finish_reason=piece.finish_reason, usage=usage
        )

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": text_logprobs(self._tokenizer, pieces, 0) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }


def _text(text: str) -> bytes:
    return b'"text":' + msgspec.json.encode(text)
