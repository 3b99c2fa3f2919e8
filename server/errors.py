"""Every way a request can fail, and its one mapping to HTTP.

    ApiError
    +- InvalidRequestError        400  the body, a field or a value
    |  +- BadHttpError            400  the bytes are no HTTP
    |  +- UnreadableBodyError     400  the body's bytes are not what its headers say
    |  +- UnsupportedFieldError   400  a field this server does not serve
    |  +- ContextLengthError      400  the prompt leaves no room in the context
    +- UnauthorizedError          401  no API key, or a wrong one
    +- UnknownModelError          404
    +- UnknownPathError           404
    +- UnknownRequestError        404  no such request of this caller is remembered
    +- WrongMethodError           405
    +- SlowBodyError              408
    +- BodyTooLargeError          413
    +- EncodingError              415  a compression that is not read
    +- ExpectationError           417
    +- InternalError              500  a defect of ours, logged with its traceback
    |  +- EngineRequestError      500  the engine failed on this one request
    |  +- RankLostError           500  the rank that ran the request died or hung
    +- RateLimitedError           429  + Retry-After, one caller's share is used up
    +- OverloadedError            503  + Retry-After
    +- NotReadyError              503  + Retry-After, no rank is ready
    |  +- ShuttingDownError       503
    +- RequestTimeoutError        504

Bodies have OpenAI's error shape. No other module knows a status code.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import ClassVar, Final

import msgspec
from aiohttp import web

log = logging.getLogger(__name__)

# Seconds after which a client may try again; short, since ranks come back and queues move within seconds.
RETRY_AFTER_S: Final = 1
# Of a client's own words in an error: enough to recognise them.
QUOTED_CHARS: Final = 80


class ApiError(Exception):
    """A failure with a client-facing message. `param` names the field at fault, if one is."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[int | None] = None
    # Whether the connection ends with the answer: where the next request would begin is not known.
    closes: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    def body(self) -> bytes:
        """The error as OpenAI's JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        """The whole HTTP answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        response = web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)
        if self.closes:
            response.force_close()
        return response


class InvalidRequestError(ApiError):
    """The client must change its request."""

    status = HTTPStatus.BAD_REQUEST
    kind = "invalid_request_error"


class BadHttpError(InvalidRequestError):
    """The bytes are no HTTP request."""

    code = "bad_http"
    closes = True


class UnreadableBodyError(InvalidRequestError):
    """The body's compression or chunks are broken."""

    code = "unreadable_body"
    closes = True


class EncodingError(InvalidRequestError):
    """The body is compressed in a way that is not read here."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_encoding"
    closes = True


class SlowBodyError(InvalidRequestError):
    """The body came slower than the server waits for."""

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "slow_body"
    closes = True


class UnsupportedFieldError(InvalidRequestError):
    """A field, or a value of it, that this server does not serve; never ignored in silence."""

    code = "unsupported_field"

    def __init__(self, field: str, why: str = "this server does not serve it") -> None:
        super().__init__(f"unsupported field '{field}': {why}", field)


class ContextLengthError(InvalidRequestError):
    """The prompt alone fills the context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int, param: str, *, at_least: bool = False) -> None:
        has = "has at least" if at_least else "has"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt {has} {prompt_tokens} "
            "tokens and at least one is needed for the answer.",
            param,
        )


class UnauthorizedError(InvalidRequestError):
    """No API key, or one that is not known here."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"


class UnknownModelError(InvalidRequestError):
    """`model` names something else than what is served."""

    status = HTTPStatus.NOT_FOUND
    code = "model_not_found"

    def __init__(self, model: str, served: str) -> None:
        named = model if len(model) <= QUOTED_CHARS else model[:QUOTED_CHARS] + "..."
        super().__init__(f"The model '{named}' does not exist; this server serves '{served}'.", "model")


class UnknownPathError(InvalidRequestError):
    """No such URL."""

    status = HTTPStatus.NOT_FOUND
    code = "unknown_url"


class UnknownRequestError(InvalidRequestError):
    """No request of that id is remembered for this caller; another caller's is as good as none."""

    status = HTTPStatus.NOT_FOUND
    code = "request_not_found"


class WrongMethodError(InvalidRequestError):
    """The URL exists, the method does not."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than the server reads."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "body_too_large"


class ExpectationError(InvalidRequestError):
    """An `Expect` header that asks for something else than to go on with the body."""

    status = HTTPStatus.EXPECTATION_FAILED
    code = "expectation_failed"


class InternalError(ApiError):
    """Our fault; the log has the traceback."""

    code = "internal_error"


class EngineRequestError(InternalError):
    """The engine could not run this request; other requests are untouched."""

    code = "engine_error"


class RankLostError(InternalError):
    """The engine rank that ran the request is gone."""

    code = "rank_lost"


class OverloadedError(ApiError):
    """Every place is taken."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "overloaded_error"
    code = "overloaded"
    default_retry_after_s = RETRY_AFTER_S


class RateLimitedError(ApiError):
    """This caller has more waiting than its share; others are served."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    default_retry_after_s = RETRY_AFTER_S


class RequestTimeoutError(ApiError):
    """The request took longer than the server allows."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    kind = "timeout_error"
    code = "request_timeout"


class NotReadyError(ApiError):
    """No rank can take a request at this moment."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "server_error"
    code = "not_ready"
    default_retry_after_s = RETRY_AFTER_S


class ShuttingDownError(NotReadyError):
    """The server was told to stop."""

    code = "shutting_down"


def from_http(error: web.HTTPException, asked: str) -> ApiError:
    """aiohttp's own refusals (routing, body size) in our shape; `asked` is method and path."""
    match error.status:
        case HTTPStatus.NOT_FOUND:
            return UnknownPathError(f"no such URL: {asked}")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return WrongMethodError(f"this URL does not take that method: {asked}")
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return BodyTooLargeError(error.text or "the request body is too large")  # aiohttp names the limit
        case _:
            return InvalidRequestError(error.reason)


def outside_handlers(status: int, reason: str) -> ApiError:
    """What went wrong before or behind our handlers: bytes that are no HTTP, or a defect."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("a request failed outside its handler: %s", reason)
        return InternalError("the server failed on this request; its log has the reason")
    return BadHttpError(f"the request is not valid HTTP: {reason}")


def health_response(payload: object, *, ready: bool) -> web.Response:
    """A readiness answer: 200 or 503, with what is or is not ready as its body."""
    status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
    return web.Response(status=status, body=msgspec.json.encode(payload), content_type="application/json")
