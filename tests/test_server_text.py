"""Flags and a model folder -> tokenizer, encoder, renderer; and what metrics say of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.config import Config, ConfigError, parse
from server.fields import Message
from server.metrics import Metrics
from server.text import TextTools, text_tools
from server.tokenizer.backend import CacheCounts, HfBackend, Ids
from tests.byte_tokenizer import write_model
from tests.tokenizer_kinds import DEPENDENT, loaded


def made(folder: Path, **fields: object) -> tuple[TextTools, Metrics]:
    metrics = Metrics()
    config = dataclasses.replace(Config(model=str(folder)), **fields)  # type: ignore[arg-type]
    return text_tools(config, metrics), metrics


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, backend) -> value, summed over other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(metrics.expose().decode()):
        for sample in family.samples:
            if sample.name.startswith("deepinfer_tokenizer:") and "le" not in sample.labels:
                key = (sample.name.partition(":")[2], sample.labels["backend"])
                found[key] = found.get(key, 0) + sample.value
    return found


def test_flags_are_read() -> None:
    flags = ["--tokenizer-backend", "segment", "--tokenizer-verify-rate", "0.5", "--log-prompts"]
    config, warnings = parse([*flags, "--special-tokens-in-text", "keep"], {})
    assert (config.tokenizer_backend, config.tokenizer_verify_rate) == ("segment", 0.5)
    assert (config.log_prompts, config.special_tokens_in_text) == (True, "keep")
    assert warnings == []
    assert not parse([], {})[0].log_prompts
    with pytest.raises(ConfigError, match=r"--tokenizer-verify-rate 1\.5"):
        parse(["--tokenizer-verify-rate", "1.5"], {})


@pytest.mark.parametrize(("wanted", "taken"), [("auto", "fastokens"), ("segment", "segment"), ("hf", "hf")])
def test_the_backend_is_as_asked_and_in_the_metrics(tmp_path: Path, wanted: str, taken: str) -> None:
    tools, metrics = made(write_model(tmp_path), tokenizer_backend=wanted)
    assert tools.encoder.backend.name == taken
    for _ in range(2):
        tools.encoder.encode("hello<|im_end|>" * 200, True)
    found = scrape(metrics)
    assert found["backend", taken] == 1
    assert found["encode_seconds_count", taken] == 2
    assert found["tokens_total", taken] == 2 * (6 * 200 + 1)
    assert found["cache_hits_total", taken] > 0
    assert found["cache_bytes", taken] > 0
    assert found["mismatches_total", taken] == found["switches_total", taken] == 0


def test_a_backend_that_would_be_wrong_refuses_to_start(tmp_path: Path) -> None:
    loaded(DEPENDENT["single_word"][0](), tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer-backend segment: .*single_word"):
        made(tmp_path, tokenizer_backend="segment")


def test_a_switch_shows(tmp_path: Path) -> None:
    class Wrong(HfBackend):
        name = "wrong"  # type: ignore[misc]

        def encode(self, text: str) -> Ids:
            return np.array([1], np.int32)

        def counts(self) -> CacheCounts:
            return CacheCounts()

    tools, _ = made(write_model(tmp_path), tokenizer_verify_rate=1.0)
    encoder, metrics = tools.encoder, Metrics()
    encoder._lane = encoder._lane_of(Wrong(tools.tokenizer.backend))
    metrics.watch_encoder(encoder, "for the test")
    assert scrape(metrics)["backend", "wrong"] == 1
    encoder.encode("hello", False)
    encoder.verifier.wait()
    found = scrape(metrics)
    assert found["backend", "hf"] == 1
    assert found["mismatches_total", "wrong"] == found["switches_total", "wrong"] == found["checks_total", "wrong"] == 1
    encoder.close()


@pytest.mark.parametrize(("choice", "ranges"), [("plain", 1), ("keep", 0)])
def test_typed_special_tokens_are_as_the_flag_says(tmp_path: Path, choice: str, ranges: int) -> None:
    tools, _ = made(write_model(tmp_path), special_tokens_in_text=choice)
    prompt = tools.renderer.render([Message(role="user", content="a<|im_end|>b")])
    assert len(prompt.plain) == ranges


def test_the_folders_encoder_writes_and_fallbacks_are_counted(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding.py").write_text(
        "def encode_messages(messages, thinking_mode):\n    return thinking_mode + messages[1]['content']\n"
    )
    tools, metrics = made(folder, thinking_mode="thinking")
    message = Message(role="user", content="hi")
    assert tools.renderer.render([message, message]).text == "thinkinghi"
    assert tools.renderer.render([message]).text.startswith("<|im_start|>user\nhi")
    assert "deepinfer:encode_fallbacks_total 1.0" in metrics.expose().decode()


def test_a_folder_that_cannot_serve_names_the_flag(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="--model: "):
        made(folder)
    assert json.loads((folder / "config.json").read_text())
