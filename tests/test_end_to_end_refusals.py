"""Every way to be refused over HTTP: wrong fields, URLs, sizes and bytes; the server goes on after each."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from server.body import MAX_MESSAGES
from tests.byte_tokenizer import MAX_MODEL_LEN, write_model
from tests.http_calls import CHAT, FIXED, HELLO, HELLO_IDS, TEXT, post, refusal
from tests.serving import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_model(tmp_path_factory.mktemp("http") / "tiny")
    with RunningServer(model, "--max-body-mb", "1") as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.address) as session:
        yield session


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}, {"prompt": 1}, {"messages": []}])
async def test_tokenize_refuses_what_is_no_text(client: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    await refusal(client, "/tokenize", 400, json=body)


@pytest.mark.parametrize("tokens", [[260], [-1], [2**40], [2**70], "text", [1.5]])
async def test_detokenize_refuses_what_is_no_id(client: aiohttp.ClientSession, tokens: object) -> None:
    error = await refusal(client, "/detokenize", 400, json={"tokens": tokens})
    assert "tokens" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/v1/chat", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", TEXT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_wrong_urls_and_methods_have_openai_s_shape(
    client: aiohttp.ClientSession, method: str, path: str, status: int, code: str
) -> None:
    assert (await refusal(client, path, status, method))["code"] == code


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_body_above_the_limit_is_refused_and_the_server_goes_on(
    client: aiohttp.ClientSession, path: str
) -> None:
    error = await refusal(client, path, 413, data=io.BytesIO(b'{"prompt":"' + b"x" * 2_000_000 + b'"}'))
    assert error["code"] == "body_too_large"
    assert str(2**20) in error["message"]
    await post(client, TEXT, prompt="after", **FIXED)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "temperature": 3}, "temperature"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "developer", "content": "x"}]}, "messages"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "n": 129}, "n"),
        (CHAT, {"messages": HELLO, "stop": ""}, "stop"),
        (CHAT, {"messages": HELLO, "stop": ["x"] * 17}, "stop"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logit_bias": {"999": 1}}, "logit_bias"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, 260]}, "prompt"),
        (TEXT, {"prompt": [1, -1]}, "prompt"),
        (TEXT, {"prompt": [1, 2**31]}, "prompt"),
        (TEXT, {"prompt": [1, 2**70]}, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, "prompt"),
        (TEXT, {"prompt": ["x", 1]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [1.0]}, "prompt"),
        (TEXT, {"prompt": [None]}, "prompt"),
        (TEXT, {"prompt": [[[1]]]}, "prompt"),
        (TEXT, {"prompt": {"text": "x"}}, "prompt"),
        (TEXT, {"prompt": ["x"] * 257}, "prompt"),
        (TEXT, {"prompt": ["fine", [1] * MAX_MODEL_LEN]}, "prompt"),
        (TEXT, {"prompt": "x", "echo": True}, "echo"),
    ],
)
async def test_bad_fields_are_refused_by_name(
    server: RunningServer, client: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str
) -> None:
    for streamed in (False, True):
        error = await refusal(client, path, 400, json={**body, "stream": streamed})
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
    server.wait_idle()


async def test_a_prompt_longer_than_the_context_is_told_both_numbers(client: aiohttp.ClientSession) -> None:
    chat = {"messages": [{"role": "user", "content": "hello" + "x" * 9000}]}
    for path, body, length in ((TEXT, {"prompt": [1] * 9000}, 9000), (CHAT, chat, len(HELLO_IDS) + 9000)):
        error = await refusal(client, path, 400, json=body)
        assert error["code"] == "context_length_exceeded"
        assert f"{MAX_MODEL_LEN} tokens" in error["message"]
        assert f"{length} tokens" in error["message"]


async def test_another_model_s_name_is_404(client: aiohttp.ClientSession) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        error = await refusal(client, path, 404, json={**body, "model": "other"})
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'other'" in error["message"]
    await post(client, TEXT, prompt="x", model="tiny", **FIXED)


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({}, b"{"),
        ({}, b""),
        ({}, b"\x00\xff"),
        ({"Content-Encoding": "gzip"}, b"not gzip"),
        ({"Content-Encoding": "deflate"}, b"not deflate"),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_client_s_fault(
    server: RunningServer, client: aiohttp.ClientSession, headers: dict[str, str], data: bytes
) -> None:
    before = len(server.log())
    request = client.post(CHAT, data=data, headers={"Content-Type": "application/json", **headers})
    async with request as answer:
        assert answer.status == 400
    assert "Traceback" not in server.log()[before:]
    await post(client, TEXT, prompt="after", **FIXED)


async def test_a_compression_that_is_not_read_is_refused_by_name(client: aiohttp.ClientSession) -> None:
    error = await refusal(client, CHAT, 415, data=b"{}", headers={"Content-Encoding": "snappy"})
    assert error["code"] == "unsupported_encoding"
    assert "'snappy'" in error["message"]


async def raw_answer(server: RunningServer, request: bytes) -> bytes:
    """The first line of what the server says to these bytes."""
    url = urlsplit(server.address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /live HTTP/1.1\r\nHost: x\r\nExpect: the-moon\r\n\r\n", b" 417 "),
        (b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n", b" 200 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}", b" 100 "),
        (b"no http at all\r\n\r\n", b" 400 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n", b" 400 "),
    ],
)
async def test_broken_http_gets_an_answer(server: RunningServer, request_bytes: bytes, status: bytes) -> None:
    assert status in await raw_answer(server, request_bytes)
    assert server.get("/live") == (200, {"status": "ok"})


async def test_a_client_that_leaves_in_its_own_body_leaves_no_trace(server: RunningServer) -> None:
    before = len(server.log())
    url = urlsplit(server.address)
    assert url.port is not None
    for head in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
        with socket.create_connection((str(url.hostname), url.port)) as half:
            half.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\n%b" % (CHAT.encode(), head))
    async with aiohttp.ClientSession(server.address) as client:
        await post(client, TEXT, prompt="after", **FIXED)
    server.wait_idle()
    assert "Traceback" not in server.log()[before:]


async def test_what_cannot_fit_the_context_is_refused_before_it_is_looked_at(server: RunningServer) -> None:
    too_long = "x" * 500_000
    many = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (TEXT, {"prompt": too_long}, "at least"),
        (TEXT, {"prompt": [1] * 200_000}, "200000 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": too_long}]}, "at least"),
        (CHAT, {"messages": many}, f"at most {MAX_MESSAGES}"),
    ]
    async with aiohttp.ClientSession(server.address) as client:
        for path, body, told in cases:
            async with client.post(path, data=io.BytesIO(json.dumps(body).encode())) as answer:
                assert answer.status == 400
                assert told in (await answer.json())["error"]["message"]
