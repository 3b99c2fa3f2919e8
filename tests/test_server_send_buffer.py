"""What real kernel buffers hold for a client: so little that a stall shows soon, enough for answers of any size."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from ipc.messages import Finish
from server import sse
from server.connection import SEND_BUFFER
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.certificate import make_certificate
from tests.http_calls import TEXT
from tests.local_server import LocalServer, local_server
from tests.rank_pair import until
from tests.stalled_client import connect, stalled_client

STALLED: Final = 3
ROUND: Final = 32  # tokens a request in one batch
# All that is said to each client, events of some 170 bytes: an eighth of what the kernel takes when it is left alone.
ROUNDS: Final = 96
CONTROL: Final = 1  # a character that takes six bytes of JSON
BIG_ROUND: Final = 8000
BIG_TOKENS: Final = 10 * BIG_ROUND
BIG_BODY: Final = b'{"prompt":[1],"max_tokens":%d}' % BIG_TOKENS
BIG_REQUEST: Final = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
    TEXT.encode(),
    len(BIG_BODY),
    BIG_BODY,
)
READ_BYTES: Final = 16384


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("send_buffer") / "tiny"))


@pytest.fixture(scope="module", params=["http", "https"])
def tls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """The contexts of the server and of its clients."""
    if request.param == "http":
        return None
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"))
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(cert, key)
    return own, ssl.create_default_context(cafile=str(Path(cert)))


@pytest.fixture
async def server(
    tokenizer: TextTokenizer, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None
) -> AsyncIterator[LocalServer]:
    async with local_server(tokenizer, seqs=STALLED, tls=tls and tls[0]) as running:
        yield running


async def test_the_kernel_hides_no_stall(
    server: LocalServer, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_TIMEOUT_S", 0.5)
    with contextlib.ExitStack() as closing:
        clients = [
            closing.enter_context(await asyncio.to_thread(stalled_client, server.port, tls and tls[1]))
            for _ in range(STALLED)
        ]
        silent = [await server.started() for _ in clients]
        for _ in range(ROUNDS):
            for started in silent:
                started.say([97] * ROUND)
            await until(lambda: server.pairs[0].server.depth().records == 0)
        await until(lambda: server.metric("stalled_readers_total") == STALLED)
        # Not merely closed: then the kernel would go on offering them what it holds.
        await until(lambda: all(map(was_reset, clients)))
    await server.idle()


def was_reset(client: socket.socket) -> bool:
    """Whether the server has dropped the connection and all that waited on it."""
    poller = select.poll()
    poller.register(client, 0)
    return any(flags & select.POLLERR for _, flags in poller.poll(0))


async def test_a_slow_reader_gets_all_of_a_big_answer(
    server: LocalServer, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None
) -> None:
    with await asyncio.to_thread(connect, server.port, tls and tls[1]) as client:
        reading = asyncio.create_task(asyncio.to_thread(exchange, client, BIG_REQUEST))
        started = await server.started()
        for at in range(0, BIG_TOKENS, BIG_ROUND):
            started.say([CONTROL] * BIG_ROUND, Finish.LENGTH if at + BIG_ROUND == BIG_TOKENS else Finish.NONE)
            await until(lambda: server.pairs[0].server.depth().records == 0)
        document = await reading
    assert len(document) > 2 * SEND_BUFFER
    assert msgspec.json.decode(document)["choices"][0]["text"] == chr(CONTROL) * BIG_TOKENS


def exchange(client: socket.socket, request: bytes) -> bytes:
    """The body of the answer to a request, read in small pieces until the server closes."""
    client.sendall(request)
    answer = bytearray()
    while piece := client.recv(READ_BYTES):
        answer += piece
    return bytes(answer).partition(b"\r\n\r\n")[2]
