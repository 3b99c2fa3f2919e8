"""`POST /v1/chat/completions`: the handler and the bytes of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from server.answer import Usage, answer
from server.body import read
from server.envelope import Envelope
from server.errors import InvalidRequestError
from server.fields import ChatRequest
from server.generate import Piece
from server.logprobs import chat_logprobs
from server.services import REQUEST_ID, SERVICES, Call
from server.tokenizer.load import TextTokenizer


async def chat(request: web.Request) -> web.StreamResponse:
    """Render, tokenize, submit, answer."""
    services = request.app[SERVICES]
    call = Call(request[REQUEST_ID], "chat", "messages")
    body = await read(request, ChatRequest)
    services.check_model(body.model)
    logprobs = _logprobs(body)
    with services.metrics.encode.time():
        prompt = services.renderer.render(body.messages)
        ids = await services.encode(prompt, "messages", add_special_tokens=False)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = services.start(call, ids, body, max_tokens, logprobs)
    form = ChatForm(call.request_id, services.config.model_name, services.tokenizer, logprobs=logprobs >= 0)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return await answer(request, [generation], form, stream=body.stream, include_usage=include_usage)


def _logprobs(body: ChatRequest) -> int:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(f"top_logprobs: {body.top_logprobs} needs logprobs true", "top_logprobs")
    return body.top_logprobs if body.logprobs else -1


class ChatForm:
    """`chat.completion` and `chat.completion.chunk` objects of one request."""

    def __init__(self, request_id: str, model: str, tokenizer: TextTokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._envelope = Envelope(f"chatcmpl-{request_id}", "chat.completion", "chat.completion.chunk", model)

    def opening(self, index: int) -> bytes:
        """The chunk with the role."""
        return self._envelope.chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", None)

    def events(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """One chunk a token that shows; the last one always, for its finish reason."""
        shown = (piece for piece in pieces if piece.text or piece.finish_reason or self._logprobs)
        return b"".join(self._piece(index, piece) for piece in shown)

    def usage_event(self, usage: Usage) -> bytes:
        """The `choices: []` chunk."""
        return self._envelope.usage_event(usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The `chat.completion` object."""
        return self._envelope.document([self._choice(*numbered) for numbered in enumerate(choices)], usage)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, pieces) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _piece(self, index: int, piece: Piece) -> bytes:
        delta = b'"delta":{"content":%b}' % msgspec.json.encode(piece.text) if piece.text else b'"delta":{}'
        logprobs = msgspec.json.encode(chat_logprobs(self._tokenizer, [piece])) if self._logprobs else b"null"
        return self._envelope.chunk(index, delta, logprobs, piece.finish_reason)
