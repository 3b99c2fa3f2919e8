"""Who may call, and over what: API keys from flags and from a file that changes, HTTPS with a certificate."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.byte_tokenizer import write_model
from tests.certificate import make_certificate
from tests.http_calls import FIXED, HELLO, TEXT, post, refusal, stream
from tests.serving import DEADLINE_S, RunningServer, eventually
from tests.test_end_to_end_lifecycle import ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("access") / "tiny")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("# ours\n\nfrom-the-file\n")
    return file


@pytest.fixture(scope="module")
def server(model: Path, key_file: Path) -> Iterator[RunningServer]:
    with RunningServer(model, "--api-key", "from-a-flag", "--api-key-file", str(key_file)) as running:
        yield running


def bearer(server: RunningServer, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.address, headers={"Authorization": f"Bearer {key}"})


async def test_only_known_keys_are_served(server: RunningServer) -> None:
    for key in ("from-a-flag", "from-the-file"):
        async with bearer(server, key) as client:
            assert len(await stream(client, TEXT, prompt="x", **FIXED)) == 12
    async with aiohttp.ClientSession(server.address) as client:
        headers = {"X-API-Key": "from-the-file"}
        async with client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=headers) as answer:
            assert answer.status == 200
        for wrong in ({}, {"Authorization": "Bearer no"}, {"X-API-Key": "# ours"}, {"Authorization": "Basic ZnJv"}):
            for path, method in ((TEXT, "POST"), ("/v1/models", "GET"), ("/deepinfer/metrics", "GET")):
                error = await refusal(client, path, 401, method, headers=wrong, json={"prompt": "x"})
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        for path in ("/health", "/live"):
            async with client.get(path) as answer:
                assert answer.status == 200
    assert "from-" not in server.log(), "no key is logged"


def test_a_changed_file_counts_and_a_broken_one_locks_nobody_out(server: RunningServer, key_file: Path) -> None:
    def allowed(key: str) -> bool:
        request = urllib.request.Request(f"{server.address}/v1/models", headers={"X-API-Key": key})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False

    key_file.write_text("a-new-one\n")
    eventually(lambda: allowed("a-new-one"), "the new key is known")
    assert not allowed("from-the-file")
    assert allowed("from-a-flag")
    key_file.unlink()
    key_file.mkdir()
    eventually(lambda: allowed("a-new-one") and "stay in force" in server.log(), "the bad file was noticed")
    assert allowed("a-new-one")
    key_file.rmdir()
    key_file.write_text("from-the-file\n")
    eventually(lambda: allowed("from-the-file"), "the file is read again")


def test_a_key_file_that_cannot_be_used_is_a_configuration_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name, told in (("missing", "No such file"), ("empty", "holds no key")):
        status, log = ended(model, "--api-key-file", str(tmp_path / name))
        assert status == 2
        assert f"error: --api-key-file {tmp_path / name}: " in log
        assert told in log


# ---- HTTPS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-made certificate for 127.0.0.1 and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_https_streams_and_answers_like_http(model: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    with RunningServer(model, "--ssl-certfile", cert, "--ssl-keyfile", key) as server:
        assert server.address.startswith("https://127.0.0.1:")
        trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
        async with aiohttp.ClientSession(server.address, connector=trusting) as client:
            whole = await post(client, "/v1/chat/completions", messages=HELLO, **FIXED)
            chunks = await stream(client, "/v1/chat/completions", messages=HELLO, **FIXED)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == whole["choices"][0]["message"]["content"]
            # Longer than what TLS and the transport hold back together.
            long = await stream(client, TEXT, prompt=[1], max_tokens=8000, ignore_eos=True, temperature=0)
            assert len(long) == 8000
            assert (await refusal(client, TEXT, 400, json={"prompt": []}))["param"] == "prompt"
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get(f"{server.address}/live")
            with pytest.raises(aiohttp.ClientError):
                await stranger.get(f"{server.address}/live".replace("https", "http"))
        assert "Traceback" not in server.log()


def test_a_certificate_that_cannot_be_used_is_a_configuration_error(
    model: Path, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing.pem")
    cert, key = map(str, certificate)
    for given, told in (
        ((missing, key), f"--ssl-certfile {missing}: there is no such file"),
        ((cert, missing), f"--ssl-keyfile {missing}: there is no such file"),
        ((cert, ""), f"--ssl-certfile {cert} without --ssl-keyfile: cannot be used: "),
        ((key, cert), f"--ssl-certfile {key} --ssl-keyfile {cert}: cannot be used: "),
    ):
        status, log = ended(model, f"--ssl-certfile={given[0]}", f"--ssl-keyfile={given[1]}")
        assert status == 2
        assert f"error: {told}" in log
