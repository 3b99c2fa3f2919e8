"""Web pages of other origins: told that they may call, or told nothing; never let in without their key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from ipc.messages import Finish
from server.keys import Keys
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.http_calls import CHAT, TEXT
from tests.local_server import local_server

PAGE = "https://app.test"
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("cors") / "tiny"))


def cors_of(headers: Mapping[str, str]) -> dict[str, str]:
    prefix = "Access-Control-"
    return {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("allowed", "told"), [(PAGE, PAGE), ("*", "*")])
async def test_a_preflight_of_an_allowed_page_needs_no_key(tokenizer: TextTokenizer, allowed: str, told: str) -> None:
    async with (
        local_server(tokenizer, keys=Keys(["k"]), cors_origin=("https://other.test", allowed)) as server,
        server.client() as client,
        client.options(CHAT, headers={"Origin": PAGE, **ASKING}) as answer,
    ):
        assert answer.status == 200
        found = cors_of(answer.headers)
    assert found["Allow-Origin"] == told
    assert found["Allow-Headers"] == "authorization,content-type"
    assert "POST" in found["Allow-Methods"]
    assert int(found["Max-Age"]) > 0


async def test_a_preflight_is_no_way_around_the_key(tokenizer: TextTokenizer) -> None:
    async with local_server(tokenizer, keys=Keys(["k"]), cors_origin=(PAGE,)) as server, server.client() as client:
        async with client.post(TEXT, json={"prompt": [1]}, headers={"Origin": PAGE, **ASKING}) as answer:
            assert answer.status == 401
            assert cors_of(answer.headers)["Allow-Origin"] == PAGE, "the page may read why"
        async with client.options(CHAT, headers={"Origin": PAGE}) as answer:
            assert answer.status in (401, 405)  # no preflight: it asks for no method


@pytest.mark.parametrize("origins", [(), ("https://other.test",), ("https://app.test:8443",), ("http://app.test",)])
async def test_other_pages_are_told_nothing(tokenizer: TextTokenizer, origins: tuple[str, ...]) -> None:
    async with local_server(tokenizer, cors_origin=origins) as server, server.client() as client:
        async with client.options(CHAT, headers={"Origin": PAGE, **ASKING}) as answer:
            assert answer.status == 405
            assert cors_of(answer.headers) == {}
        async with client.get("/v1/models", headers={"Origin": PAGE}) as answer:
            assert cors_of(answer.headers) == {}


async def test_streams_and_refusals_can_be_read_by_the_page(tokenizer: TextTokenizer) -> None:
    async with (
        local_server(tokenizer, cors_origin=(PAGE,)) as server,
        server.client(headers={"Origin": PAGE}) as client,
    ):
        call = asyncio.create_task(client.post(TEXT, json={"prompt": [1], "stream": True}))
        (await server.started()).say([97], Finish.LENGTH)
        for answer in (await call, await client.post(TEXT, json={"prompt": []}), await client.get("/nowhere")):
            async with answer:
                found = cors_of(answer.headers)
                assert (found["Allow-Origin"], found["Expose-Headers"]) == (PAGE, "X-Request-ID")
                assert answer.headers["Vary"] == "Origin"
                await answer.read()
