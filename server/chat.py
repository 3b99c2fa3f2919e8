"""`POST /v1/chat/completions`: the handler and the bytes of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from server.account import Call
from server.affinity import session_key
from server.answer import answer
from server.body import read
from server.envelope import Envelope, Usage
from server.errors import InvalidRequestError
from server.events import EventWriter
from server.fields import ChatRequest, Message
from server.form import Form
from server.generate import Piece
from server.logprobs import chat_logprobs
from server.services import CALL, SERVICES, Asked, Services


async def chat(request: web.Request) -> web.StreamResponse:
    """Render, tokenize, submit, answer."""
    services = request.app[SERVICES]
    call = request[CALL]
    body = await read(request, ChatRequest)
    services.check_model(body.model)
    manner, logprobs = services.manner(body), _logprobs(body)
    with services.metrics.encode.time():
        prompt = await services.render(body.messages)
        ids = await services.encode(prompt, "messages", add_special_tokens=False)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    session = session_key(request.headers, _first_words(body.messages))
    changed = services.conversations.changed(call.caller.encode() + session, body.messages)
    generations = services.generations(Asked(call, "messages", session, max_tokens, logprobs, changed), [ids], body)
    return await answer(request, generations, ChatForm(services, call, logprobs=logprobs >= 0), manner)


def _first_words(messages: Sequence[Message]) -> str:
    return next((message.text for message in messages if message.role == "user"), "")


def _logprobs(body: ChatRequest) -> int:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(f"top_logprobs: {body.top_logprobs} needs logprobs true", "top_logprobs")
    return body.top_logprobs if body.logprobs else -1


class ChatForm(Form):
    """`chat.completion` and `chat.completion.chunk` objects of one request."""

    def __init__(self, services: Services, call: Call, *, logprobs: bool) -> None:
        model = services.config.served_model_name
        envelope = Envelope(f"chatcmpl-{call.request_id}", "chat.completion", "chat.completion.chunk", model)
        super().__init__(services, envelope, logprobs=logprobs)

    def opening(self, index: int) -> bytes:
        """The chunk with the role."""
        return self._envelope.chunk(index, b'"delta":{"role":"assistant","content":""}')

    def last(self, index: int, text: str, finish_reason: str) -> bytes:
        """The chunk with the finish reason."""
        return self._envelope.chunk(index, _delta(text), finish_reason=finish_reason)

    def _text_writer(self, index: int) -> EventWriter:
        return self._writers.writer(*self._envelope.around(index, b'"delta":{"content":', b"}"), skip_empty=True)

    def _shows(self, piece: Piece) -> bool:
        return bool(piece.text or piece.finish_reason or self._logprobs)

    def _chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        logprobs = msgspec.json.encode(chat_logprobs(self._tokenizer, [piece])) if self._logprobs else b"null"
        return self._envelope.chunk(
            index, _delta(piece.text), logprobs=logprobs, finish_reason=piece.finish_reason, usage=usage
        )

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, pieces) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }


def _delta(text: str) -> bytes:
    return b'"delta":{"content":%b}' % msgspec.json.encode(text) if text else b'"delta":{}'
