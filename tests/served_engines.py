"""Tiny models that a test's server serves: by the fake engine, or by the native one with random weights.

Both have the byte tokenizer, so a prompt of ids below 128 is the same text for either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from engine.fake_settings import ENTRY_BYTES
from hicache.keys import PAGE_TOKENS
from tests import byte_tokenizer
from tests.serving import RunningServer

_LAYERS: Final = 2
_HEAD_DIM: Final = 16


@dataclass(frozen=True)
class Served:
    """A model folder and what it is served with: `served(*flags)` is a server to enter."""

    model: Path
    page_bytes: int
    flags: tuple[str, ...] = ()

    def __call__(self, *flags: str, environ: Mapping[str, str] | None = None) -> RunningServer:
        return RunningServer(self.model, *self.flags, *flags, environ=environ)

    def pool(self, pages: float) -> tuple[str, str]:
        """Flags for a host pool of so many pages."""
        return "--hicache-size-gb", f"{pages * self.page_bytes / 2**30:.9f}"


def fake(folder: Path) -> Served:
    """A function of the pages instead of a model."""
    return Served(byte_tokenizer.write_model(folder), ENTRY_BYTES * PAGE_TOKENS)


def native(folder: Path) -> Served:
    """A llama of two layers in float32."""
    from tests import tiny_models  # it loads torch

    byte_tokenizer.write_model(folder)
    changes: dict[str, Any] = {"vocab_size": byte_tokenizer.VOCAB_SIZE, "bos_token_id": byte_tokenizer.BOS}
    changes |= {"eos_token_id": byte_tokenizer.EOS, "max_position_embeddings": byte_tokenizer.MAX_MODEL_LEN}
    tiny_models.write("llama", folder, num_hidden_layers=_LAYERS, num_key_value_heads=1, head_dim=_HEAD_DIM, **changes)
    page_bytes = _LAYERS * 2 * _HEAD_DIM * 4 * PAGE_TOKENS
    flags = ("--engine", "native", "--num-kv-blocks", "160", "--hicache-size-gb", "0.05")
    return Served(folder, page_bytes, flags)


KINDS: Final[dict[str, Callable[[Path], Served]]] = {"fake": fake, "native": native}
# A native rank takes seconds to start.
NATIVE_LATER: Final = ["fake", pytest.param("native", marks=pytest.mark.soak)]
