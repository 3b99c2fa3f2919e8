"""The server's configuration: one frozen value, built at the edge and checked at birth.

The parser takes its defaults from the dataclass. Every error names the flag and the value. Knows nothing of
sockets, processes or models.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NoReturn

MAX_RANKS: Final = 64  # far above the GPUs of a node; a typo must not fork hundreds of processes
# A host has less; beyond it a count of bytes or slots was typed where another unit was meant.
MAX_HICACHE_GB: Final = 65536.0
MAX_STATE_SLOTS: Final = 2**24

ENGINES: Final = ("auto", "native", "fake")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
THINKING_MODES: Final = ("chat", "thinking")
ROUTINGS: Final = ("affinity", "least-loaded")
RANK_FAILURES: Final = ("restart", "exit")
TOKENIZER_BACKENDS: Final = ("auto", "fastokens", "segment", "hf")
SPECIAL_TOKENS: Final = ("plain", "keep")
METRICS_COMPAT: Final = ("none", "vllm")
# Fields given by repeating a flag.
LISTS: Final = ("api_key", "cors_origin")
# DEEPINFER_ACCELERATOR -> torch device; unset looks for a GPU.
ACCELERATORS: Final = {"nvidia": "cuda", "cpu": "cpu"}

# Flags that scripts for other engines carry and that change nothing here yet: taken, with a warning.
INERT_FLAGS: Final = {
    "--yoco-keep-tokens": "no served model replays a bounded tail",
    "--prefill-any-interval": "prompts and decodes share a step, nobody waits for an interval",
    "--eplb-interval": "ranks are replicas, there are no experts to move between them",
    "--eplb-after-prefill": "ranks are replicas, there are no experts to move between them",
}


class ConfigError(ValueError):
    """A flag or variable has a value the server cannot start with; the message names both."""


@dataclass(frozen=True, slots=True)
class Config:
    """All of it. Sizes are per rank, times in seconds."""

    model: str = ""  # folder; empty: the embedded demo model
    served_model_name: str = ""  # empty: the folder's name
    engine: str = "auto"
    dp: int = 1
    host: str = "127.0.0.1"
    port: int = 8888
    dtype: str = "auto"
    max_model_len: int = 0  # 0: the model's own
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 32768
    gpu_memory_utilization: float = 0.9
    num_kv_blocks: int = 0  # 0: sized from memory
    hicache_size_gb: float | None = None  # None: from the memory that is available; 0: no prefix is reused
    hicache_state_slots: int = 4096
    hicache_verify_loads: bool = False
    thinking_mode: str = "chat"
    tokenizer_backend: str = "auto"
    tokenizer_verify_rate: float = 0.01
    special_tokens_in_text: str = "plain"
    log_prompts: bool = False
    routing: str = "affinity"
    max_waiting: int = 1024  # requests in the line before a rank
    max_waiting_tokens: int = 2**24  # their prompt tokens
    request_timeout: float = 0.0  # 0: none
    max_body_mb: int = 256
    api_key: tuple[str, ...] = ()
    api_key_file: str = ""
    cors_origin: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    on_rank_failure: str = "restart"
    step_timeout: float = 300.0
    shutdown_timeout: float = 30.0
    log_interval_steps: int = 200
    metrics_compat: str = "none"
    device: str = "auto"

    def __post_init__(self) -> None:
        """Check every field. Raises ConfigError."""
        _one_of("--engine", self.engine, ENGINES)
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--thinking-mode", self.thinking_mode, THINKING_MODES)
        _one_of("--tokenizer-backend", self.tokenizer_backend, TOKENIZER_BACKENDS)
        _one_of("--special-tokens-in-text", self.special_tokens_in_text, SPECIAL_TOKENS)
        _within("--tokenizer-verify-rate", self.tokenizer_verify_rate, 0, 1)
        _one_of("--routing", self.routing, ROUTINGS)
        _one_of("--on-rank-failure", self.on_rank_failure, RANK_FAILURES)
        _one_of("--metrics-compat", self.metrics_compat, METRICS_COMPAT)
        _within("--dp", self.dp, 1, MAX_RANKS)
        _within("--port", self.port, 0, 65535)
        _within("--max-model-len", self.max_model_len, 0, 2**31 - 1)
        _within("--max-num-seqs", self.max_num_seqs, 1, 65536)
        _within("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        _within("--gpu-memory-utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _within("--num-kv-blocks", self.num_kv_blocks, 0, 2**31 - 1)
        if self.hicache_size_gb is not None:
            _within("--hicache-size-gb", self.hicache_size_gb, 0, MAX_HICACHE_GB)
        _within("--hicache-state-slots", self.hicache_state_slots, 1, MAX_STATE_SLOTS)
        _within("--max-waiting", self.max_waiting, 0, 2**20)
        _within("--max-waiting-tokens", self.max_waiting_tokens, 0, 2**40)
        _within("--request-timeout", self.request_timeout, 0, 86400)
        _within("--max-body-mb", self.max_body_mb, 1, 4096)
        _within("--step-timeout", self.step_timeout, 1, 86400)
        _within("--shutdown-timeout", self.shutdown_timeout, 0, 86400)
        _within("--log-interval-steps", self.log_interval_steps, 0, 2**31 - 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: a step must have room for one token of every running sequence"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(f"--ssl-keyfile {self.ssl_keyfile} needs --ssl-certfile")
        if "" in self.api_key:
            raise ConfigError("--api-key '' is empty: it would let everybody in")
        if self.model and not Path(self.model).is_dir():
            raise ConfigError(
                f"--model (or DEEPINFER_HF_MODEL_DIR) {self.model!r} is not a folder; models are not downloaded by name"
            )

    def named(self, model: str) -> Config:
        """The same for this model folder, with the name that clients use filled in."""
        name = self.served_model_name or Path(model).resolve().name
        return dataclasses.replace(self, model=model, served_model_name=name)


def _one_of(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is not one of {', '.join(allowed)}")


def _within(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{flag} {value} is not between {low} and {high}")


_HELP: Final = {
    "model": "model folder (default: $DEEPINFER_HF_MODEL_DIR, else the embedded demo model)",
    "served_model_name": "name that clients use (default: the folder's name)",
    "engine": "auto is native; fake answers without a model",
    "dp": "engine processes: one per GPU, or replicas that share the CPU's cores",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "dtype": "auto: the checkpoint's own, float32 on CPUs without bfloat16 arithmetic",
    "max_model_len": "longest prompt + answer in tokens; 0 is the model's own",
    "max_num_seqs": "sequences running at once per rank",
    "max_num_batched_tokens": "tokens of one step per rank: longer prompts are prefilled in chunks (on a CPU of 512 at "
    "most)",
    "gpu_memory_utilization": "share of a GPU's memory to use",
    "num_kv_blocks": "128-token KV blocks per rank; 0 sizes the pool from memory",
    "hicache_size_gb": "host memory of the prefix cache per rank, in GiB; 0 turns it off (default: what "
    "available memory allows)",
    "hicache_state_slots": "host slots per rank for the states of models that keep some beside their pages",
    "hicache_verify_loads": "compare the checksum of every page that is loaded from the prefix cache",
    "thinking_mode": "what the chat template is told about thinking",
    "tokenizer_backend": "auto takes the fastest that equals the plain tokenizer on probes; one by name must equal it",
    "tokenizer_verify_rate": "share of prompts that are tokenized again in the background; a difference switches to hf",
    "special_tokens_in_text": "special tokens that a user typed: plain text, or keep them as the tokenizer reads them",
    "log_prompts": "let logs show the piece of a prompt on which tokenizers differ",
    "routing": "affinity keeps a conversation on its rank unless that is far behind; or always the least loaded",
    "max_waiting": "requests in the line before a rank; more get 503",
    "max_waiting_tokens": "prompt tokens in the line before a rank; more get 503",
    "request_timeout": "seconds from a request's body to its last token; 0 is no limit",
    "api_key": "key that clients must send; may be given several times, and is visible in the process list",
    "api_key_file": "file of keys, one a line; read again when it changes",
    "cors_origin": "origin whose web pages may call; may be given several times; * is any",
    "ssl_certfile": "certificate chain (PEM): serve HTTPS",
    "ssl_keyfile": "its private key (PEM), if it is not in the same file",
    "max_body_mb": "longest request body in MiB; longer ones get 413",
    "on_rank_failure": "restart a rank that died or hung, or exit with an error",
    "step_timeout": "seconds one engine step may take before its rank counts as hung",
    "shutdown_timeout": "seconds running requests may take to end after SIGTERM or Ctrl-C; the second ends them now",
    "log_interval_steps": "a log line every so many engine steps; 0 is never",
    "metrics_compat": "vllm: the metrics under vLLM's names too, at /metrics; none: nothing there",
}


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Config, list[str]]:
    """Command line and environment to a Config, and warnings for flags that change nothing.

    Raises ConfigError; wrong syntax ends the process as argparse does.
    """
    values = vars(_parser(environ).parse_args(argv))
    warnings = [
        f"{flag} has no effect: {why}" for flag, why in INERT_FLAGS.items() if values.pop(_name(flag)) is not None
    ]
    for name in LISTS:
        values[name] = tuple(values[name])
    return Config(device=_device(environ), **values), warnings


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m server",
        description="OpenAI-compatible server for agentic traffic.",
        # Names are fixed: a cut one that works today would be ambiguous with the next flag.
        allow_abbrev=False,
    )
    choices = {"engine": ENGINES, "dtype": DTYPES, "thinking_mode": THINKING_MODES, "routing": ROUTINGS}
    choices |= {"on_rank_failure": RANK_FAILURES, "tokenizer_backend": TOKENIZER_BACKENDS}
    choices |= {"special_tokens_in_text": SPECIAL_TOKENS, "metrics_compat": METRICS_COMPAT}
    for item in fields(Config):
        if item.name == "device":
            continue
        default = environ.get("DEEPINFER_HF_MODEL_DIR", "") if item.name == "model" else item.default
        kind: Callable[[str], object] = float if item.default is None else type(item.default)
        flag = "--" + item.name.replace("_", "-")
        if item.name in LISTS:
            parser.add_argument(flag, action="append", default=[], help=_HELP[item.name])
            continue
        if isinstance(item.default, bool):
            parser.add_argument(flag, action="store_true", default=item.default, help=_HELP[item.name])
            continue
        text = _HELP[item.name] + (" (default: %(default)s)" if item.default not in ("", None) else "")
        parser.add_argument(flag, type=kind, default=default, choices=choices.get(item.name), help=text)
    for flag in INERT_FLAGS:
        parser.add_argument(flag, default=None, help=argparse.SUPPRESS)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of below all flags."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _device(environ: Mapping[str, str]) -> str:
    accelerator = environ.get("DEEPINFER_ACCELERATOR", "")
    if not accelerator:
        return "auto"
    if accelerator not in ACCELERATORS:
        raise ConfigError(f"DEEPINFER_ACCELERATOR={accelerator!r} is not one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[accelerator]
