"""The small endpoints: models, health, live, metrics, requests, cache, tokenize, detokenize."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from server.body import read
from server.errors import InvalidRequestError, health_response
from server.fields import DetokenizeRequest, TokenizeRequest
from server.metrics_compat import VllmMetrics, cache_counts
from server.rank import Rank, RankState
from server.services import CALL, SERVICES, Services


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`: the one model served, with its context."""
    services = request.app[SERVICES]
    return _json({"object": "list", "data": [_model(services)]})


async def model(request: web.Request) -> web.Response:
    """`GET /v1/models/{model}`. Raises UnknownModelError."""
    services = request.app[SERVICES]
    services.check_model(request.match_info["model"])
    return _json(_model(services))


def _model(services: Services) -> dict[str, Any]:
    name = services.config.served_model_name
    found = {"id": name, "object": "model", "created": services.created, "owned_by": "deepinfer", "root": name}
    facts = next((rank.facts for rank in services.ranks if rank.facts is not None), None)
    if facts is not None:
        found["max_model_len"] = facts.max_model_len
    return found


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 when every rank takes requests, else 503 and which one does not, and why."""
    services = request.app[SERVICES]
    ranks = services.ranks
    ready = sum(rank.state is RankState.READY for rank in ranks)
    payload = {
        "status": _status(services, ready),
        "ready_ranks": ready,
        "total_ranks": len(ranks),
        "ranks": [_rank(rank) for rank in ranks],
        "prefix_cache": services.cache.trust.as_json(),
    }
    return health_response(payload, ready=payload["status"] == "ok")


def _status(services: Services, ready: int) -> str:
    if services.submitter.closed:
        return "stopping"
    if ready == len(services.ranks):
        return "ok"
    lost = any(rank.state is RankState.LOST or rank.restarts for rank in services.ranks)
    return "degraded" if lost else "loading"


def _rank(rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": rank.index, "state": str(rank.state), "requests": rank.slots.taken}
    if rank.reason:
        found["reason"] = rank.reason
    return found


async def live(_: web.Request) -> web.Response:
    """`GET /live`: the event loop turns."""
    return _json({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """`GET /deepinfer/metrics`: Prometheus text."""
    return _prometheus(request.app[SERVICES].metrics.expose())


async def vllm_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, with `--metrics-compat vllm`: Prometheus text with vLLM's names."""
    services = request.app[SERVICES]
    name, waiting = services.config.served_model_name, services.submitter.waiting
    cached = partial(cache_counts, services.cache)
    return _prometheus(VllmMetrics(name, services.metrics, services.ranks, waiting, cached).expose())


def _prometheus(text: bytes) -> web.Response:
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def explain(request: web.Request) -> web.Response:
    """`GET /deepinfer/requests/{id}`: what a recent request of this caller reused. Raises UnknownRequestError.

    The id is that of the header, or the one in an answer's body.
    """
    request_id = request.match_info["id"].removeprefix("chatcmpl-").removeprefix("cmpl-")
    return _json(request.app[SERVICES].recent.find(request[CALL].caller, request_id))


async def reset_cache(request: web.Request) -> web.Response:
    """`POST /deepinfer/cache/reset`: nothing that is cached now is used again; running requests go on."""
    services = request.app[SERVICES]
    dropped = services.cache.reset()
    return _json({"prefix_cache": services.cache.trust.as_json(), "dropped_pages": dropped})


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`: the ids of a text or of a rendered conversation."""
    services = request.app[SERVICES]
    body = await read(request, TokenizeRequest)
    services.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        prompt = await services.render(body.messages, add_generation_prompt=body.add_generation_prompt)
        ids = await services.encode(prompt, "messages", add_special_tokens=False)
    else:
        ids = await services.encode(body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens)
    found: dict[str, Any] = {"count": len(ids), "tokens": ids.tolist()}
    if body.return_token_strs:
        # Off the loop: a long text has many tokens to spell.
        found["token_strs"] = await asyncio.to_thread(lambda: list(map(services.tokenizer.token_text, ids.tolist())))
    facts = services.ranks[0].facts
    found["max_model_len"] = None if facts is None else facts.max_model_len
    return _json(found)


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`: the text of ids, special tokens included."""
    services = request.app[SERVICES]
    body = await read(request, DetokenizeRequest)
    services.check_model(body.model)
    ids = np.array(body.tokens, np.int64)
    if len(ids) and ids.max() >= services.tokenizer.vocab_size:
        raise InvalidRequestError(
            f"tokens: id {ids.max()} is outside the vocabulary of {services.tokenizer.vocab_size}", "tokens"
        )
    return _json({"prompt": services.tokenizer.decode(body.tokens, skip_special=False)})


def _json(payload: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
