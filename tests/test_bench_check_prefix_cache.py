"""The check of a live server's prefix cache: it passes on a good server, and it fails where a page is the wrong one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.check_prefix_cache import TIE, Token, main, same
from tests.byte_tokenizer import write_model
from tests.serving import RunningServer

# A device on which the second answer to a question takes the blocks of the first, so that pages come from the host.
FLAGS = ["--num-kv-blocks", "9"]
ARGUMENTS = ["--conversations", "2", "--turns", "4", "--words", "60", "--max-tokens", "6"]
# Imported by every Python that finds it: engines that store each prompt's pages in the wrong order, with the checksums
# of what they stored.
WRONG_ORDER = """
import sys
if "engine" in sys.orig_argv:
    from hicache.transfer import CpuTransfer
    store = CpuTransfer.store
    CpuTransfer.store = lambda self, blocks, slots: store(self, blocks[::-1].copy(), slots)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("check") / "tiny")


def test_a_good_server_passes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(model, *FLAGS, "--api-key", "secret") as server:
        assert main(["--url", server.address, "--api-key", "secret", *ARGUMENTS]) == 0
    line = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    *turns, summary = line["rows"]
    assert len(turns) == 8
    assert summary["same"] == "8/8"
    assert summary["bypassed"] is True
    assert 0 < summary["from host"] <= summary["cached"] < summary["prompt"]


def test_a_wrong_page_fails_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_ORDER)
    with RunningServer(model, *FLAGS, environ={"PYTHONPATH": str(tmp_path)}) as server:
        assert main(["--url", server.address, *ARGUMENTS]) == 1
    summary = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])["rows"][-1]
    assert summary["from host"] > 0
    assert summary["same"] != "8/8"


def test_a_server_that_does_not_answer_is_no_difference(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(model, "--api-key", "secret") as server:
        assert main(["--url", server.address, *ARGUMENTS]) == 2
    assert "no API key" in capsys.readouterr().err
    assert main(["--url", server.address, *ARGUMENTS]) == 2


def test_the_address_is_that_of_an_sdk_or_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1/v1/", *ARGUMENTS]) == 2
    assert capsys.readouterr().err.startswith("http://127.0.0.1:1: ")
    with pytest.raises(SystemExit):
        main(["--url", "127.0.0.1:8888"])
    assert "does not begin with http" in capsys.readouterr().err


def answer(*tokens: tuple[str, dict[str, float]]) -> list[Token]:
    return [Token(text, likely) for text, likely in tokens]


def test_answers_are_the_same_or_part_at_a_tie_or_are_not() -> None:
    near = {"a": -1.0, "b": -1.0 - TIE / 2}
    far = {"a": -1.0, "b": -1.0 - TIE * 2}
    assert same(answer(("a", near)), answer(("a", far))) == "yes"
    assert same(answer(("a", near)), answer(("a", near), ("b", near))) == "NO"
    assert same(answer(("a", near), ("a", near)), answer(("b", near), ("b", far))) == "tie"
    assert same(answer(("a", near)), answer(("b", far))) == "NO"
    assert same(answer(("a", {"a": 0.0, "c": 0.0})), answer(("b", near))) == "NO"


@pytest.mark.soak
@pytest.mark.parametrize("flags", [["--dp", "1"], ["--dp", "2", "--routing", "least-loaded"]], ids=["dp1", "dp2"])
@pytest.mark.parametrize("states", ["0", "1"])
def test_two_hundred_conversations_that_branch_anywhere(model: Path, flags: list[str], states: str) -> None:
    with RunningServer(model, *flags, "--num-kv-blocks", "40", environ={"DEEPINFER_FAKE_STATES": states}) as server:
        arguments = ["--conversations", "200", "--turns", "5", "--words", "80", "--max-tokens", "200"]
        assert main(["--url", server.address, *arguments]) == 0
        server.wait_idle()
        assert server.metric("faults_total", "deepinfer_hicache") == 0
