"""Every error's status and OpenAI shape; the tree at the top of the module is true."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest
from aiohttp import web

from server import errors
from server.errors import ApiError

KINDS: dict[str, type[ApiError]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ApiError) and kind is not ApiError
}
DRAWN = re.findall(r"^ +([|+ -]*)(\w+Error) +(?:(\d{3}))?", errors.__doc__ or "", re.MULTILINE)


def instance(kind: type[ApiError]) -> ApiError:
    """An error of the kind, built from words wherever its parameters allow."""
    parameters = [
        one for one in list(inspect.signature(kind.__init__).parameters.values())[1:] if one.default is one.empty
    ]
    numbers = {"prompt_tokens": 600, "max_model_len": 512}
    return kind(**{parameter.name: numbers.get(parameter.name, "words") for parameter in parameters})  # type: ignore[arg-type]


def test_the_drawn_tree_names_every_error_with_its_status() -> None:
    assert {name: int(status) for _, name, status in DRAWN if status} == {
        name: int(kind.status) for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_error_has_openai_s_shape(kind: type[ApiError]) -> None:
    error = instance(kind)
    response = error.response()
    assert response.status == kind.status
    assert response.content_type == "application/json"
    assert isinstance(response.body, bytes)
    body = msgspec.json.decode(response.body)
    assert body.keys() == {"error"}
    assert body["error"] == {"message": str(error), "type": kind.kind, "param": error.param, "code": kind.code}
    assert body["error"]["message"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_only_what_passes_by_itself_says_when_to_come_back(kind: type[ApiError]) -> None:
    headers = instance(kind).response().headers
    assert ("Retry-After" in headers) == (kind.status in (429, 503))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_clients_are_told_whose_fault_it_is(kind: type[ApiError]) -> None:
    assert (kind.kind in ("invalid_request_error", "rate_limit_error")) == (400 <= kind.status < 500)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (web.HTTPNotFound(), 404, "unknown_url"),
        (web.HTTPMethodNotAllowed("PUT", ["GET"]), 405, "method_not_allowed"),
        (web.HTTPRequestEntityTooLarge(max_size=10, actual_size=11), 413, "body_too_large"),
        (web.HTTPBadRequest(reason="bad framing"), 400, None),
    ],
)
def test_aiohttp_s_refusals_take_our_shape(error: web.HTTPException, status: int, code: str | None) -> None:
    ours = errors.from_http(error, "GET /x")
    assert (ours.status, ours.code) == (status, code)
    assert ours.kind == "invalid_request_error"


def test_a_body_above_the_limit_is_told_the_limit() -> None:
    assert "10" in errors.from_http(web.HTTPRequestEntityTooLarge(max_size=10, actual_size=11), "POST /x").message


@pytest.mark.parametrize("ready", [True, False])
def test_health_is_503_until_ready(ready: bool) -> None:
    response = errors.health_response({"status": "x"}, ready=ready)
    assert response.status == (200 if ready else 503)
    assert response.body == b'{"status":"x"}'
