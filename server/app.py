"""The aiohttp application: URL -> handler, and the border every request passes on its way in and out."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from server import admin
from server.account import Call
from server.chat import chat
from server.completions import completions
from server.config import Config
from server.cors import Cors
from server.errors import ApiError, ExpectationError, InternalError, from_http
from server.keys import ANONYMOUS
from server.services import CALL, SERVICES, Services
from server.sse import ReaderStalledError

log = logging.getLogger(__name__)

_MIB: Final = 2**20
# Of a path in an error: enough to see the typo.
LOGGED_CHARS: Final = 100
# A client's own id is echoed and logged, so it is short and of harmless characters, or replaced.
_CLEAN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Load balancers and orchestrators ask these without a key.
_OPEN_PATHS: Final = frozenset({"/health", "/live"})


def build(config: Config, services: Services) -> web.Application:
    """The application for these services."""
    cors = Cors(config.cors_origin)
    app = web.Application(middlewares=[cors.preflight, border], client_max_size=config.max_body_mb * _MIB)
    app[SERVICES] = services
    app.on_response_prepare.append(_name_response)
    app.on_response_prepare.append(cors.allow)
    get, post = partial(web.get, expect_handler=expect), partial(web.post, expect_handler=expect)
    app.add_routes(
        [
            post("/v1/chat/completions", chat),
            post("/v1/completions", completions),
            get("/v1/models", admin.models),
            get("/v1/models/{model:.+}", admin.model),
            get("/health", admin.health),
            get("/live", admin.live),
            get("/deepinfer/metrics", admin.metrics),
            get("/deepinfer/requests/{id}", admin.explain),
            post("/deepinfer/cache/reset", admin.reset_cache),
            post("/tokenize", admin.tokenize),
            post("/detokenize", admin.detokenize),
        ]
    )
    if config.metrics_compat == "vllm":
        # Not by default: benchmark tools scrape this path by themselves and refuse names they do not know.
        app.add_routes([get("/metrics", admin.vllm_metrics)])
    return app


@web.middleware
async def border(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request and its caller, and turn every failure into OpenAI's error shape."""
    given = request.headers.get("X-Request-ID", "")
    request_id = given if _CLEAN_ID.fullmatch(given) else secrets.token_hex(16)
    endpoint = request.path.removeprefix("/v1/")
    request[CALL] = Call(request_id, endpoint, ANONYMOUS)
    try:
        if request.path not in _OPEN_PATHS:
            request[CALL] = Call(request_id, endpoint, _caller(request))
        return await handler(request)
    except ApiError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        return _refused(request, from_http(error, f"{request.method} {request.path[:LOGGED_CHARS]}"))
    except ConnectionError as error:
        return _unanswered(request, error)
    except asyncio.CancelledError:
        # The client left, or the server ends; whatever was held has been given back on the way here.
        raise
    except Exception:  # the request's border
        log.exception("request %s failed", request_id)
        _break_off(request)
        return _refused(request, InternalError("the server failed on this request; its log has the reason"))


async def expect(request: web.Request) -> web.Response | None:
    """Answer an `Expect` header: go on, or a refusal in our shape (aiohttp asks this before any middleware)."""
    asked = request.headers.get("Expect", "")
    if asked.lower() != "100-continue":
        return ExpectationError(f"Expect: {asked[:40]!r} is not served, only 100-continue").response()
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer itself has not begun
    return None


def _break_off(request: web.Request) -> None:
    """A second answer inside the first would be read as part of it: cut an opened stream instead."""
    if request.writer.output_size and request.transport is not None:
        request.transport.abort()


def _caller(request: web.Request) -> str:
    headers = request.headers
    return request.app[SERVICES].keys.name_of(headers.get("Authorization", ""), headers.get("X-API-Key", ""))


def _refused(request: web.Request, error: ApiError) -> web.Response:
    request.app[SERVICES].metrics.refused.labels(code=error.code or error.kind).inc()
    return error.response()


def _unanswered(request: web.Request, error: ConnectionError) -> web.Response:
    """The client is gone: there is nobody to answer, and nothing went wrong here."""
    if isinstance(error, ReaderStalledError):
        log.warning("request %s cut off: %s", request[CALL].request_id, error)
        request.app[SERVICES].metrics.stalled.inc()
    return web.Response()


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    if (call := request.get(CALL)) is not None:
        response.headers["X-Request-ID"] = call.request_id
