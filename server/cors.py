"""Cross-origin calls from web pages, for the origins named by `--cors-origin`; none by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

ANY: Final = "*"
# How long a browser may remember a preflight: a day, the most any of them keeps.
MAX_AGE_S: Final = 86400


class Cors:
    """Answers preflights and marks answers for allowed origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    @property
    def preflight(self) -> Middleware:
        """Middleware that answers a page's question whether it may call."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            return self._permission(request) or await handler(request)

        return answer

    async def allow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page of an allowed origin read the answer."""
        origin = self._allowed(request)
        if origin is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "X-Request-ID"
            response.headers[hdrs.VARY] = "Origin"

    def _permission(self, request: web.Request) -> web.Response | None:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None or self._allowed(request) is None:
            return None
        # A preflight carries no key, so it is answered before one is asked for.
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        return web.Response(headers=headers)

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._origins.intersection((ANY, origin)):
            return None
        return ANY if ANY in self._origins else origin
