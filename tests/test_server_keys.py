"""API keys: who is let in, that a changed file counts, and that a broken one locks nobody out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import keys as keys_module
from server.errors import UnauthorizedError
from server.keys import ANONYMOUS, KeyFileError, Keys


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "RELOAD_INTERVAL_S", 0.0)


def test_without_keys_everybody_is_anonymous() -> None:
    assert not Keys().required
    assert Keys().name_of("", "") == ANONYMOUS
    assert Keys().name_of("Bearer whatever", "") == ANONYMOUS


@pytest.mark.parametrize(("authorization", "x_api_key"), [("Bearer one", ""), ("bearer  one", ""), ("", "one")])
def test_a_known_key_has_a_name_that_does_not_show_it(authorization: str, x_api_key: str) -> None:
    name = Keys(["one", "two"]).name_of(authorization, x_api_key)
    assert name == Keys(["one"]).name_of("Bearer one", "")
    assert name != Keys(["two"]).name_of("Bearer two", "")
    assert "one" not in name


@given(st.text(max_size=20), st.text(max_size=20))
def test_nothing_else_is_let_in(authorization: str, x_api_key: str) -> None:
    if "secret" in authorization or "secret" in x_api_key:
        return
    with pytest.raises(UnauthorizedError):
        Keys(["secret"]).name_of(authorization, x_api_key)


def test_a_changed_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nold\n\n")
    keys = Keys(["given"], file)
    assert keys.name_of("Bearer old", "")
    file.write_text("new\n")
    assert keys.name_of("Bearer new", "")
    assert keys.name_of("Bearer given", "")
    with pytest.raises(UnauthorizedError):
        keys.name_of("Bearer old", "")


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\xfe", None])
def test_a_file_that_turns_bad_keeps_the_keys(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("good\n")
    keys = Keys((), file)
    file.unlink() if content is None else file.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert keys.name_of("Bearer good", "")
    assert str(file) in caplog.text
    assert "good" not in caplog.text


@pytest.mark.parametrize("content", ["", "#\n"])
def test_a_bad_file_at_start_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(KeyFileError, match=f"--api-key-file {file}"):
        Keys((), file)
    with pytest.raises(KeyFileError, match="missing"):
        Keys((), tmp_path / "missing")
