"""The aiohttp application: URL -> handler, and the border every request passes on its way out."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from server import admin
from server.chat import chat
from server.completions import completions
from server.config import Config
from server.errors import ApiError, InternalError, from_http
from server.services import REQUEST_ID, SERVICES, Services

log = logging.getLogger(__name__)

_MIB: Final = 2**20
# A client's own id is echoed and logged, so it is short and of harmless characters, or replaced.
_CLEAN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def build(config: Config, services: Services) -> web.Application:
    """The application for these services."""
    app = web.Application(middlewares=[border], client_max_size=config.max_body_mb * _MIB)
    app[SERVICES] = services
    app.on_response_prepare.append(_name_response)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat),
            web.post("/v1/completions", completions),
            web.get("/v1/models", admin.models),
            web.get("/v1/models/{model:.+}", admin.model),
            web.get("/health", admin.health),
            web.get("/live", admin.live),
            web.get("/deepinfer/metrics", admin.metrics),
            web.post("/tokenize", admin.tokenize),
            web.post("/detokenize", admin.detokenize),
        ]
    )
    return app


@web.middleware
async def border(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and turn every failure into OpenAI's error shape."""
    given = request.headers.get("X-Request-ID", "")
    request[REQUEST_ID] = given if _CLEAN_ID.fullmatch(given) else secrets.token_hex(16)
    try:
        return await handler(request)
    except ApiError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        return _refused(request, from_http(error))
    except ConnectionError:
        # The client is gone: there is nobody to answer, and nothing went wrong here.
        return web.Response()
    except Exception:  # the request's border
        log.exception("request %s failed", request[REQUEST_ID])
        return _refused(request, InternalError("the server failed on this request; its log has the reason"))


def _refused(request: web.Request, error: ApiError) -> web.Response:
    request.app[SERVICES].metrics.refused.labels(code=error.code or error.kind).inc()
    response = error.response()
    if request.content.exception() is not None:
        # Behind a body that broke off nobody knows where the next request starts.
        response.force_close()
    return response


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:  # refused before it reached the border otherwise
        response.headers["X-Request-ID"] = request[REQUEST_ID]
