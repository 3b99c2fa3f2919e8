"""Step 1 of a request's path: bounded HTTP body -> typed request, or an InvalidRequestError naming field and value.

A field nobody knows, or one this server does not serve, is refused by name unless it is null or asks for nothing.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from server.errors import (
    BodyTooLargeError,
    EncodingError,
    InvalidRequestError,
    SlowBodyError,
    UnreadableBodyError,
    UnsupportedFieldError,
)
from server.fields import LABELS, UNSERVED
from server.services import SERVICES

T = TypeVar("T", bound=msgspec.Struct)

# A name or value quoted in an error: enough to recognise it, never a whole prompt.
QUOTED_CHARS: Final = 80
# msgspec's own words, which quote unknown names and wrong choices at full length.
REASON_CHARS: Final = 200

# Far above any agent's conversation; each costs the loop some microseconds before its length is known.
MAX_MESSAGES: Final = 16384
# What aiohttp undoes without a library of its own; anything else it would hand on as it is.
ENCODINGS: Final = frozenset({"", "identity", "gzip", "deflate"})
# A client that trickles its body holds a connection and memory: it gets half a minute, and more for what it sends.
GRACE_S: Final = 30.0
MIN_BYTES_PER_S: Final = 64 * 1024

_PATH: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


async def read(request: web.Request, kind: type[T]) -> T:
    """The request's body as `kind`. Raises InvalidRequestError, BodyTooLargeError, EncodingError and SlowBodyError."""
    encoding = request.headers.get("Content-Encoding", "")
    if encoding.lower() not in ENCODINGS:
        raise EncodingError(f"Content-Encoding: {encoding[:QUOTED_CHARS]!r} is not read here, only gzip and deflate")
    try:
        body = await _bounded(request)
    except (web.RequestPayloadError, PayloadEncodingError) as error:
        request.content.feed_eof()  # aiohttp would look for the rest of a body that has none
        raise UnreadableBodyError(f"the body cannot be read: {error}") from error
    async with request.app[SERVICES].turns.turn(len(body)):
        return parse(body, kind)


async def _bounded(request: web.Request) -> bytes:
    """All of the body, within its bounds of size and time."""
    limit = request.client_max_size
    body = bytearray()
    _check_size(request.content_length or 0, limit)
    started = time.monotonic()
    while not request.content.is_eof():
        left = GRACE_S + len(body) / MIN_BYTES_PER_S - (time.monotonic() - started)
        try:
            async with asyncio.timeout(left):
                piece = await request.content.readany()
        except TimeoutError:
            raise SlowBodyError(f"only {len(body)} bytes of the body came in time") from None
        body += piece
        _check_size(len(body), limit)
    # What is here needs no timer, and is mostly all of it.
    body += request.content.read_nowait()
    _check_size(len(body), limit)
    return bytes(body)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLargeError(f"the body has at least {size} bytes, the server reads {limit}")


def parse(body: bytes, kind: type[T]) -> T:
    """Bytes to a typed request. Raises InvalidRequestError and UnsupportedFieldError."""
    with _no_collections():
        return _parse(body, kind)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage meanwhile.

    JSON has no cycles, but a body of millions of small arrays would be walked again and again while it grows: that is
    six times the work of reading it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parse(body: bytes, kind: type[T]) -> T:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {_quoted(raw)}")
    fields = _served(_without_nulls(raw), kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), fields) from None


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    """Drop null fields, of messages too: clients send them for "not set"."""
    found = {name: value for name, value in raw.items() if value is not None}
    if isinstance(messages := found.get("messages"), list):
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequestError(
                f"messages: {len(messages)} messages, at most {MAX_MESSAGES} are served", "messages"
            )
        found["messages"] = [_message(index, message) for index, message in enumerate(messages)]
    return found


def _message(index: int, message: object) -> object:
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if value is not None}
    for name in found.keys() - {"role", "content", "name", "tool_call_id"}:
        if found[name] not in ([], ""):
            raise UnsupportedFieldError(f"messages[{index}].{name[:QUOTED_CHARS]}")
        del found[name]
    return found


def _served(fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    known = LABELS.union(kind.__struct_encode_fields__)
    for name, value in fields.items():
        if name in known:
            continue
        if name not in UNSERVED:
            raise UnsupportedFieldError(name[:QUOTED_CHARS], "it is unknown here")
        if not any(type(value) is type(harmless) and value == harmless for harmless in UNSERVED[name]):
            raise UnsupportedFieldError(name, f"{_quoted(value)} asks for something this server does not serve")
    return fields


def _named(message: str, fields: dict[str, Any]) -> InvalidRequestError:
    """msgspec's message with the field and its value in front."""
    match = _PATH.search(message)
    path = match["path"] if match else ""
    text = _PATH.sub("", message)[:REASON_CHARS]
    if not path:
        return InvalidRequestError(text)
    # Of a wrong type it says "got `str`" itself.
    got = " " if ", got `" in text else ", got "
    return InvalidRequestError(f"{path}: {text}{got}{_quoted(_at(fields, path))}", path)


def _at(value: Any, path: str) -> object:
    for index, name in _STEP.findall(path):
        try:
            value = value[int(index)] if index else value[name]
        except (LookupError, TypeError):  # a path through a key or a missing field: quote what holds it
            break
    return value


def _quoted(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "..."
