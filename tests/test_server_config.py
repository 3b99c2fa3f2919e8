"""Every flag's bounds, the words of their errors, and what the environment says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.config import INERT_FLAGS, Config, ConfigError, parse
from tests.serving import ROOT

# (flag, lowest, highest) and what else must be given for the ends to be legal.
INTEGERS = [
    ("--dp", 1, 64),
    ("--port", 0, 65535),
    ("--max-model-len", 0, 2**31 - 1),
    ("--max-num-seqs", 1, 65536),
    ("--max-num-batched-tokens", 1, 2**31 - 1),
    ("--num-kv-blocks", 0, 2**31 - 1),
    ("--max-waiting", 0, 2**20),
    ("--max-waiting-tokens", 0, 2**40),
    ("--max-body-mb", 1, 4096),
    ("--log-interval-steps", 0, 2**31 - 1),
    ("--hicache-state-slots", 1, 2**24),
]
FLOATS = [
    ("--gpu-memory-utilization", 0.01, 1.0),
    ("--hicache-size-gb", 0.0, 65536.0),
    ("--request-timeout", 0.0, 86400.0),
    ("--step-timeout", 1.0, 86400.0),
    ("--shutdown-timeout", 0.0, 86400.0),
]
CHOICES = ["--engine", "--dtype", "--thinking-mode", "--routing", "--on-rank-failure", "--metrics-compat"]


def config_of(*argv: str, **environ: str) -> Config:
    return parse(argv, environ)[0]


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def companions(flag: str) -> list[str]:
    """A step must have room for every running sequence."""
    return {"--max-num-seqs": ["--max-num-batched-tokens=65536"], "--max-num-batched-tokens": ["--max-num-seqs=1"]}.get(
        flag, []
    )


@pytest.mark.parametrize(("flag", "low", "high"), INTEGERS)
def test_integers_are_taken_at_their_bounds_and_refused_beyond(flag: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(config_of(*companions(flag), f"{flag}={value}"), field_of(flag)) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=rf"{flag} {value} is not between {low} and {high}"):
            config_of(f"{flag}={value}")


@pytest.mark.parametrize(("flag", "low", "high"), FLOATS)
def test_floats_are_taken_at_their_bounds_and_refused_beyond(flag: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(config_of(f"{flag}={value}"), field_of(flag)) == value
    for value in (low - 0.001, high * 1.001, float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ConfigError, match=rf"{flag} {value} is not between"):
            config_of(f"{flag}={value}")


@pytest.mark.parametrize("flag", CHOICES)
def test_a_wrong_choice_is_named_on_the_command_line_and_in_code(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        config_of(flag, "purple")
    assert flag in (told := capsys.readouterr().err)
    assert "purple" in told
    with pytest.raises(ConfigError, match=f"{flag} 'purple' is not one of"):
        Config(**{field_of(flag): "purple"})  # type: ignore[arg-type]


@pytest.mark.parametrize("argv", [["--port", "high"], ["--max-num-se", "4"], ["--prot", "1"], ["stray"], ["--dp"]])
def test_wrong_syntax_is_refused_in_argparse_s_way(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        config_of(*argv)
    assert argv[0] in capsys.readouterr().err


def test_a_step_must_have_room_for_all_running_sequences() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 64 is below --max-num-seqs 128"):
        config_of("--max-num-batched-tokens=64")
    assert config_of("--max-num-batched-tokens=64", "--max-num-seqs=64").max_num_seqs == 64


def test_the_defaults_are_the_dataclass_s() -> None:
    assert config_of() == Config()
    assert (Config().hicache_size_gb, Config().hicache_verify_loads) == (None, False)
    assert config_of("--hicache-verify-loads").hicache_verify_loads
    assert (Config().port, Config().max_num_seqs, Config().max_num_batched_tokens) == (8888, 128, 32768)


@pytest.mark.parametrize("flag", INERT_FLAGS)
def test_flags_without_effect_are_taken_with_a_warning(flag: str) -> None:
    config, warnings = parse([flag, "7"], {})
    assert config == Config()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{flag} has no effect: ")


def test_routing_is_taken_without_a_warning() -> None:
    for routing in ("affinity", "least-loaded"):
        config, warnings = parse(["--routing", routing], {})
        assert (config.routing, warnings) == (routing, [])


@pytest.mark.parametrize(("value", "device"), [("", "auto"), ("cpu", "cpu"), ("nvidia", "cuda")])
def test_the_accelerator_variable_chooses_the_device(value: str, device: str) -> None:
    assert config_of(DEEPINFER_ACCELERATOR=value).device == device


def test_an_unknown_accelerator_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="DEEPINFER_ACCELERATOR='abacus' is not one of nvidia, cpu"):
        config_of(DEEPINFER_ACCELERATOR="abacus")


def test_the_model_folder_comes_from_the_flag_then_the_variable(tmp_path: Path) -> None:
    flag, variable = tmp_path / "flag", tmp_path / "variable"
    for folder in (flag, variable):
        folder.mkdir()
    environ = {"DEEPINFER_HF_MODEL_DIR": str(variable)}
    assert config_of(**environ).model == str(variable)
    assert config_of("--model", str(flag), **environ).model == str(flag)
    assert config_of().model == ""


def test_a_model_that_is_no_folder_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=rf"--model .*{missing}.* is not a folder"):
        config_of("--model", str(missing))
    with pytest.raises(ConfigError, match=rf"DEEPINFER_HF_MODEL_DIR.*{missing}.* is not a folder"):
        config_of(DEEPINFER_HF_MODEL_DIR=str(missing))


def test_the_model_s_name_is_the_given_one_or_the_folder_s(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert Config().named(f"{folder}/").served_model_name == "tiny"
    assert Config(served_model_name="other").named(str(folder)).served_model_name == "other"
    assert Config().named(str(folder)).model == str(folder)


def test_repeated_flags_are_lists_and_bad_pairs_are_refused_by_name() -> None:
    config = config_of("--api-key", "a", "--api-key=b", "--cors-origin", "https://x.test")
    assert (config.api_key, config.cors_origin) == (("a", "b"), ("https://x.test",))
    with pytest.raises(ConfigError, match=r"--ssl-keyfile k\.pem needs --ssl-certfile"):
        config_of("--ssl-keyfile", "k.pem")
    with pytest.raises(ConfigError, match="--api-key '' is empty"):
        config_of("--api-key", "")


def test_help_names_every_flag_and_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        config_of("--help")
    told = " ".join(capsys.readouterr().out.split())
    for flag, *_ in (*INTEGERS, *FLOATS):
        assert flag in told
    assert "(default: )" not in told
    assert "(default: 8888)" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-num-seqs", "0"], "error: --max-num-seqs 0 is not between"),
        (["--host", "x" * 300], "error: --host xxx"),
        (["--host", "192.0.2.1"], "error: --host 192.0.2.1 --port 0: cannot listen there"),
    ],
)
def test_the_process_ends_with_status_2_and_one_line(flags: list[str], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "--model", str(tmp_path), "--engine", "fake", "--port", "0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(told)
    assert ended.stderr.count("\n") == 1
