"""Hundreds of malformed requests: each a 4xx in OpenAI's error shape, none of them felt by a neighbour's stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.byte_tokenizer import MAX_MODEL_LEN, write_model
from tests.http_calls import CHAT, HELLO, TEXT, stream
from tests.serving import DEADLINE_S, RunningServer

CASES: Final = 300  # at least so many, over all tests of this file
NEIGHBOUR: Final = {"prompt": "neighbour", "temperature": 0, "ignore_eos": True, "max_tokens": 200}
BASE: Final[dict[str, dict[str, Any]]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "x"}}

NUMBERS: Final = ["1", [], {}, True]  # never numbers, for a strict reader
WRONG: Final[dict[str, list[Any]]] = {
    "model": [1, [], {}],
    "stream": ["true", 1, []],
    "stream_options": [1, "x", [], {"include_usage": "yes"}, {"unknown": True}, {"include_usage": True}],
    "max_tokens": [*NUMBERS, 0, -1, 1.5, 2**31, 2**63, 2**70],
    "temperature": [*NUMBERS, -0.1, 2.1, 1e308, -(2**70)],
    "top_p": [*NUMBERS, 0, -1, 1.01],
    "top_k": [*NUMBERS, -2, 2**31, 0.5],
    "min_p": [*NUMBERS, -0.1, 1.1],
    "seed": [*NUMBERS, 1.5, 2**63, -(2**63) - 1, 10**400],
    "presence_penalty": [*NUMBERS, 2.1, -2.1],
    "frequency_penalty": [*NUMBERS, 2.1, -2.1],
    "repetition_penalty": [*NUMBERS, 0, -1, 11],
    "logit_bias": [1, "x", [], {"1": "x"}, {"1": 101}, {"999999": 1}, {"x": 1}, {"-1": 1}, {"1": None}],
    "min_tokens": [*NUMBERS, -1, 2**31],
    "n": [*NUMBERS, 0, -1, 129, 1.5],
    "stop": [1, {}, "", [""], ["x"] * 17, [1], "x" * 1025, [["x"]]],
    "ignore_eos": ["x", 1],
    "best_of": [2, "x"],
    "tools": [[{"type": "function"}], 1],
    "response_format": [{"type": "json_object"}, "text"],
    "echo": [True, 0],
    "no_such_field": [1, "x", [], {}],
}
OF_ONE: Final[dict[str, dict[str, list[Any]]]] = {
    CHAT: {
        "messages": [
            "x", 1, {}, [], [1], ["x"], [{}], [{"role": "user", "content": 1}], [{"role": "robot", "content": "x"}],
            [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}], [[]],
            [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "x", "odd": 1}],
            [{"role": "user", "content": "x" * (MAX_MODEL_LEN + 1)}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        ],
        "logprobs": [1, "true", []],
        "top_logprobs": [*NUMBERS, -1, 21, 5],
        "max_completion_tokens": [*NUMBERS, 0, -1, 2**31],
    },
    TEXT: {
        "prompt": [
            1, {}, [], [[]], [1.5], [-1], [260], [2**31], [2**70], ["x", 1], [1, "x"], [True], [None], [[[1]]],
            [[1], []], [{}], ["x"] * 257, [1] * MAX_MODEL_LEN, "x" * MAX_MODEL_LEN,
        ],
        "logprobs": [True, "1", -1, 21, 1.5, []],
        "suffix": ["x", 1],
    },
}  # fmt: skip

# Bodies that are no JSON object of ours; the field, where one is to blame.
RAW: Final[list[bytes]] = [
    b"", b" ", b"{", b"}", b"[", b"nul", b"null", b"1", b'"x"', b"[]", b"true", b"{}", b"{]", b'{"prompt"}', b"\x00",
    b'{"prompt":"x",}', b"{'prompt':'x'}", b'{"prompt":"x"', b'{"prompt":"x"} trailing', b'\xef\xbb\xbf{"prompt":"x"}',
    b'{"prompt":"\xff"}', b'{"prompt":"\xc3"}',
    b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\\ud800"}', b"\xff\xfe{\x00}\x00",
    b'{"prompt":"\n"}', b'{"prompt":"\\x"}',
    b'{"prompt":"x","temperature":NaN}', b'{"prompt":"x","temperature":Infinity}',
    b'{"prompt":"x","temperature":-Infinity}',
    b'{"prompt":"x","temperature":1e999}', b'{"prompt":"x","temperature":01}',
    b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", b'{"prompt":[' + b"1," * 5000 + b"]}", b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"prompt":"x","' + b"k" * 100_000 + b'":1}',
    b'{"logit_bias":{"' + b"9" * 5000 + b'":1},"prompt":"x"}', b"prompt=x", b"<prompt/>", b"--x\r\n",
]  # fmt: skip

POST: Final = b"POST %b HTTP/1.1\r\nHost: x\r\n" % TEXT.encode()
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"
# Bytes on a bare connection; whatever the server says to them is a refusal.
HTTP: Final[list[bytes]] = [
    b"x\r\n\r\n", b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET /live HTTP/x\r\n\r\n",
    b"GET /live HTTP/1.1\r\n: x\r\n\r\n",
    b"GET /live HTTP/1.1\r\nbad name: x\r\n\r\n", b"G\xffT /live HTTP/1.1\r\n\r\n",
    b"GET /live HTTP/1.1\r\nHost: x\r\nx: \x00\r\n\r\n", b"GET /live HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET /live HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    POST + b"Content-Length: -1\r\n\r\n", POST + b"Content-Length: x\r\n\r\n", POST + b"Content-Length: 1e3\r\n\r\n",
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", POST + b"Content-Length: 999999999\r\n\r\n{",
    POST + b"Transfer-Encoding: nonsense\r\n\r\n", POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"zz\r\n", CHUNKED + b"-1\r\n", CHUNKED + b"5\r\nab\r\n0\r\n\r\n", CHUNKED + b"2\r\n{}x\r\n0\r\n\r\n",
    CHUNKED + b"ffffffffffffffffffff\r\n{}", CHUNKED + b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"0\r\n\r\n", CHUNKED + b"1\r\n{\r\n0\r\n\r\n", POST + b"\r\n", POST + b"Content-Length: 0\r\n\r\n",
    POST + b"Content-Length: 5\r\n\r\n" + b'{"prompt":"x"}' + b"\r\n\r\n",
    POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    POST + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
    POST.replace(b"POST", b"BREW") + b"\r\n", POST.replace(b"POST", b"DELETE") + b"\r\n",
    POST.replace(b"/v1", b"/v2") + b"\r\n", POST.replace(b"/v1", b"/v1/../v1/..%2f") + b"\r\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_model(tmp_path_factory.mktemp("malformed") / "tiny")
    with RunningServer(model, "--max-body-mb", "1", environ={"DEEPINFER_FAKE_STEP_MS": "2"}) as running:
        yield running


def fields() -> list[tuple[str, str, Any]]:
    """(path, field, wrong value) of all wrong fields."""
    cases = [(path, name, value) for path in BASE for name, values in WRONG.items() for value in values]
    cases += [(path, name, value) for path, of in OF_ONE.items() for name, values in of.items() for value in values]
    # These mean something in one place only.
    return [case for case in cases if case[1:] != ("stream_options", {"include_usage": True}) or case[0] == CHAT]


def check_shape(error: dict[str, Any]) -> None:
    """OpenAI's, with words and a type."""
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@asynccontextmanager
async def undisturbed(server: RunningServer) -> AsyncIterator[None]:
    """Streams run beside the block, one after the other, and each reads like one that ran alone."""
    async with aiohttp.ClientSession(server.address) as client:

        async def text() -> str:
            chunks = await stream(client, TEXT, **NEIGHBOUR)
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        async def neighbours() -> None:
            while True:
                assert await text() == alone

        alone = await text()
        running = asyncio.create_task(neighbours())
        yield
        assert not running.done(), running.exception()
        assert await text() == alone
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await asyncio.to_thread(server.wait_idle)
    assert "Traceback" not in server.log()
    assert "failed outside its handler" not in server.log()


def test_there_are_enough_of_them() -> None:
    assert len(fields()) + len(RAW) * len(BASE) + len(HTTP) >= CASES


async def test_wrong_fields_are_refused_by_name(server: RunningServer) -> None:
    async with undisturbed(server), aiohttp.ClientSession(server.address) as client:
        for path, name, value in fields():
            body = json.dumps({**BASE[path], name: value})
            async with client.post(path, data=body) as answer:
                assert 400 <= answer.status < 500, (path, name, value)
                error = (await answer.json())["error"]
            check_shape(error)
            assert str(error["param"]).startswith(name.partition(".")[0]), (path, name, value, error)


async def test_bodies_that_are_no_request_are_refused(server: RunningServer) -> None:
    async with undisturbed(server), aiohttp.ClientSession(server.address) as client:
        for path in BASE:
            for body in RAW:
                async with client.post(path, data=body) as answer:
                    assert 400 <= answer.status < 500, body[:80]
                    check_shape((await answer.json())["error"])


async def test_bytes_that_are_no_http_are_refused(server: RunningServer) -> None:
    async with undisturbed(server):
        for data in HTTP:
            status, document = await exchange(server, data)
            assert 400 <= status < 500, (status, data[:80])
            check_shape(msgspec.json.decode(document)["error"])


async def exchange(server: RunningServer, data: bytes) -> tuple[int, bytes]:
    """Status and document of the first answer on a connection of its own."""
    url = urlsplit(server.address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    async with asyncio.timeout(DEADLINE_S):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:"))
        document = await reader.readexactly(int(length))
    writer.transport.abort()
    return int(head.split(b" ")[1]), document


async def test_bodies_cut_off_by_their_client_leave_nothing(server: RunningServer) -> None:
    url = urlsplit(server.address)
    async with undisturbed(server):
        for head in (POST + b"Content-Length: 100\r\n\r\n", CHUNKED + b"64\r\n"):
            for part in (b"", b"{", b'{"prompt":"x"'):
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.write(head + part)
                writer.write_eof()
                async with asyncio.timeout(DEADLINE_S):
                    assert b" 200 " not in await reader.read()
                writer.close()
                await writer.wait_closed()
