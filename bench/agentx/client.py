"""Streamed chat completions against any OpenAI-compatible server, timed as their bytes arrive.

Promises that a failure is a kind in the answer, never an exception, and that a time is taken before anything is parsed.
The first token is the first chunk with visible text of any sort; where all tokens of an answer are invisible (special
ones, as `ignore_eos` brings), it is the last chunk. Knows nothing about traces.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from bench.agentx.errors import TargetError

CHAT: Final = "/v1/chat/completions"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
# A server that is up answers the list of its models at once.
MODELS_TIMEOUT_S: Final = 30.0
# Of an error's body: enough to see what is wrong.
DETAIL_CHARS: Final = 300
# One event: a chunk may carry log-probabilities nobody asked for, but nothing grows without bound.
MAX_EVENT_BYTES: Final = 1 << 24


class Health(msgspec.Struct):
    """How many engine processes share the work, where the server tells."""

    total_ranks: int = 1


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`; None for what did not come. `error` is empty or the kind of failure."""

    started: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    detail: str = ""


class Listed(msgspec.Struct):
    """A model and, where the server tells, its context in tokens."""

    id: str
    max_model_len: int | None = None


class Listing(msgspec.Struct):
    """All of them."""

    data: list[Listed]


class Delta(msgspec.Struct):
    """What a chunk adds; only whether it is text matters here."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def visible(self) -> bool:
        """Whether a user sees something of it."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: Delta = field(default_factory=Delta)


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts by the server, in the spellings that are about."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        details = self.prompt_tokens_details
        found = details.cached_tokens if details is not None else None
        return found or self.prompt_cache_hit_tokens or 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_CHUNK: Final = msgspec.json.Decoder(Chunk)


class Client:
    """Open within its `async with` block."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 3600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        # The lanes are the limit; idle connections are kept as agents keep theirs.
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=MODELS_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[Listed]:
        """What the server serves, one at least. Raises TargetError."""
        url = self._url + MODELS
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(MODELS_TIMEOUT_S)) as reply:
                content = await reply.read()
                reply.raise_for_status()
            found = msgspec.json.decode(content, type=Listing).data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TargetError(f"--url {self._url}: {url} does not answer: {error or type(error).__name__}") from error
        except msgspec.DecodeError as error:
            raise TargetError(f"--url {self._url}: {url} is no list of models: {error}") from error
        if not found:
            raise TargetError(f"--url {self._url}: {url} lists no model")
        return found

    async def ranks(self) -> int:
        """Ranks that the server has; 1 where it does not tell."""
        try:
            async with self._session.get(self._url + HEALTH, timeout=aiohttp.ClientTimeout(MODELS_TIMEOUT_S)) as reply:
                return max(1, msgspec.json.decode(await reply.read(), type=Health).total_ranks)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return 1

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """Send a body with `stream` set and read the answer to its end."""
        content = msgspec.json.encode(body)
        answer = Answer(time.perf_counter())
        try:
            async with self._session.post(
                self._url + CHAT, data=content, headers={"Content-Type": "application/json", **headers}
            ) as reply:
                if reply.status != 200:
                    answer.error, answer.detail = f"http {reply.status}", (await reply.text())[:DETAIL_CHARS]
                else:
                    await _read(reply.content, answer)
        except TimeoutError:
            answer.error = "timeout"
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, UnicodeDecodeError, _BrokenStreamError) as error:
            answer.error, answer.detail = _kind(error), str(error)[:DETAIL_CHARS]
        answer.ended = time.perf_counter()
        return answer


class _BrokenStreamError(Exception):
    """The stream is not one, or tells of an error; `kind` is what to count it as."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


def _kind(error: Exception) -> str:
    if isinstance(error, _BrokenStreamError):
        return error.kind
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    return "bad event" if isinstance(error, msgspec.DecodeError | UnicodeDecodeError) else "broken connection"


async def _read(content: aiohttp.StreamReader, answer: Answer) -> None:
    reading = _Reading(answer)
    async for event, arrived in _events(content):
        if event == b"[DONE]":
            reading.finish()
            return
        reading.take(_CHUNK.decode(event), arrived)
    raise _BrokenStreamError("no end of stream")


class _Reading:
    """An answer as its chunks come."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._latest: float | None = None
        self._counted = False

    def take(self, chunk: Chunk, arrived: float) -> None:
        """One chunk. Raises _BrokenStreamError."""
        answer = self._answer
        if chunk.error is not None:
            raise _BrokenStreamError("error event", str(chunk.error))
        if chunk.choices:
            self._latest = arrived
        if any(choice.delta.visible for choice in chunk.choices):
            answer.first = arrived if answer.first is None else answer.first
            answer.last = arrived
        if chunk.usage is not None:
            self._counted = True
            answer.prompt_tokens, answer.cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached
            answer.completion_tokens = chunk.usage.completion_tokens

    def finish(self) -> None:
        """The end of the stream. Raises _BrokenStreamError for what it lacks."""
        answer = self._answer
        if not self._counted:
            raise _BrokenStreamError("no usage")
        if self._latest is None or not answer.completion_tokens:
            raise _BrokenStreamError("no token")
        if answer.first is None:
            answer.first = answer.last = self._latest


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each event, and when its bytes arrived; comments and other fields are skipped."""
    rest = b""
    async for piece in content.iter_any():
        arrived = time.perf_counter()
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise _BrokenStreamError("bad event", f"longer than {MAX_EVENT_BYTES} bytes")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines), arrived
