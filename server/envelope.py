"""The JSON around every answer: id, object, created, model, and the usage; made once per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from server.sse import event


class Usage(NamedTuple):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def one_more(self) -> Usage:
        """After one more token."""
        return self._replace(completion_tokens=self.completion_tokens + 1)

    def as_json(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Envelope:
    """One request's head in its two forms: a document's and a chunk's."""

    def __init__(self, id_: str, document: str, chunk: str, model: str) -> None:
        self._document = {"id": id_, "object": document, "created": int(time.time()), "model": model}
        self._chunk_head = {**self._document, "object": chunk}
        # The head without its closing brace: chunks are built around it, no object per token.
        self._open = b"data: " + msgspec.json.encode(self._chunk_head)[:-1]

    def chunk(
        self, index: int, delta: bytes, *, logprobs: bytes = b"null", finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:  # fmt: skip
        """A streamed chunk with one choice; `delta` is its name and value, `logprobs` a value, both as JSON."""
        finish = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        counts = b"" if usage is None else b',"usage":' + msgspec.json.encode(usage.as_json())
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._open, index, delta, logprobs, finish, counts,
        )  # fmt: skip

    def around(self, index: int, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Head and tail of a chunk around its text; `before` and `after` are the delta's JSON beside it."""
        # Encoded JSON holds no raw NUL, so it marks the place.
        head, _, tail = self.chunk(index, before + b"\0" + after).partition(b"\0")
        return head, tail

    def usage_event(self, usage: Usage) -> bytes:
        """The `choices: []` chunk that ends a stream."""
        return event(msgspec.json.encode({**self._chunk_head, "choices": [], "usage": usage.as_json()}))

    def document(self, choices: Sequence[dict[str, Any]], usage: Usage) -> bytes:
        """A whole answer."""
        return msgspec.json.encode({**self._document, "choices": choices, "usage": usage.as_json()})
