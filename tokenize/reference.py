"""Reference encoders of a checkpoint: the prompt's text as the model's own authors write it.

`FolderEncoder` runs `encoding/encoding.py` of the model folder: code that is trusted as the weights are. `Recipe` asks
the package deepseek-recipe, which also tells which ranges of the text are special tokens. Both end a prompt with what
opens the answer. Knows nothing about requests.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from server.tokenizer.errors import ReferenceRejectedError, TokenizerLoadError
from server.tokenizer.prefix import Ranges
from server.tokenizer.template import Message

FOLDER_FILE: Final = Path("encoding", "encoding.py")
# `model_type` of config.json -> the prompt format's name in deepseek-recipe.
RECIPES: Final = {"deepseek_v4": "DeepSeek-V4-Pro", "deepseek_v41": "DeepSeek-V4.1-Flash"}


class Written(NamedTuple):
    """A prompt's text; `special` are the ranges of its special tokens where the encoder tells."""

    text: str
    special: Ranges | None


class ReferenceEncoder(Protocol):
    """Messages -> text."""

    name: str

    def write(self, messages: Sequence[Message]) -> Written:
        """Raises ReferenceRejectedError for a conversation it does not take."""
        ...


def reference_encoder(folder: Path, thinking_mode: str) -> ReferenceEncoder | None:
    """The folder's own, the package's, or none. Raises TokenizerLoadError for one that is needed and cannot be had."""
    if (folder / FOLDER_FILE).is_file():
        return FolderEncoder(folder / FOLDER_FILE, thinking_mode)
    kind = _model_type(folder)
    return Recipe(RECIPES[kind], thinking_mode) if kind in RECIPES else None


class FolderEncoder:
    """`encode_messages(messages, thinking_mode=...)` of a file in the model folder."""

    def __init__(self, file: Path, thinking_mode: str) -> None:
        """Raises TokenizerLoadError naming the file."""
        self.name = str(FOLDER_FILE)
        self._encode: Callable[..., object] = _function(file)
        self._thinking_mode = thinking_mode

    def write(self, messages: Sequence[Message]) -> Written:
        """See `ReferenceEncoder.write`."""
        try:
            text = self._encode([dict(message) for message in messages], thinking_mode=self._thinking_mode)
        except Exception as error:  # code of the model folder: whatever it raises is a refusal
            raise ReferenceRejectedError(f"{self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise ReferenceRejectedError(f"{self.name}: encode_messages gave {type(text).__name__}, not text")
        return Written(text, None)


class Recipe:
    """DeepSeek's published prompt formats."""

    name = "deepseek-recipe"

    def __init__(self, format_name: str, thinking_mode: str) -> None:
        """Raises TokenizerLoadError where the package is missing."""
        try:
            self._package = importlib.import_module("deepseek_recipe")
        except ImportError as error:
            raise TokenizerLoadError(
                f"prompts of {format_name} are written by the package deepseek-recipe, which is not installed: {error}"
            ) from error
        self._model = format_name
        self._options = self._package.ConversionOptions(default_thinking_mode=thinking_mode == "thinking")
        kind = "DeepseekV41Encoding" if "4.1" in format_name else "DeepseekV4Encoding"
        self._encoding = getattr(self._package, kind)()

    def write(self, messages: Sequence[Message]) -> Written:
        """See `ReferenceEncoder.write`."""
        body = json.dumps({"model": self._model, "messages": list(messages)})
        try:
            conversation = self._package.ChatCompletionRequest(body).convert(self._options).conversation
            rendered = self._encoding.render_conversation(conversation)
        except (ValueError, self._package.ConversionError) as error:
            raise ReferenceRejectedError(f"{self.name}: {error}") from error
        return Written(rendered.prompt, tuple(rendered.special_ranges))


def between(special: Ranges, size: int) -> Ranges:
    """The ranges of a text of this size that lie between the given ones."""
    borders = [0, *(place for one in special for place in one), size]
    return tuple((low, high) for low, high in zip(borders[::2], borders[1::2], strict=True) if low < high)


def _function(file: Path) -> Callable[..., object]:
    spec = importlib.util.spec_from_file_location("deepinfer_model_encoding", file)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # code of the model folder
        raise TokenizerLoadError(f"{file}: cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, "encode_messages", None)
    if not callable(found):
        raise TokenizerLoadError(f"{file}: has no function encode_messages")
    return found  # type: ignore[no-any-return]


def _model_type(folder: Path) -> str:
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
