"""Model folder -> `TextTokenizer`: the chat template, the ids of a text, the text of ids.

Promises what `transformers` would do with the same folder, offline, and never imports torch: the generic fast class
reads `tokenizer.json` alone, where AutoTokenizer pulls in the modelling code. Knows nothing about requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from server.tokenizer.errors import TokenizerLoadError
from server.tokenizer.pieces import Pieces
from server.tokenizer.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


# Characters that a normalizer makes one of, at the most: a letter and its marks.
MAX_SHRINKING: Final = 8


class TextTokenizer:
    """A loaded tokenizer. Safe to use from several threads once built."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self.template: Final = ChatTemplate(fast)
        self.backend: Final[Tokenizer] = fast.backend_tokenizer
        # tokenizer.json may carry a training-time cut or padding; a prompt is never cut silently.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.pieces: Final = Pieces(self.backend)
        # A text longer than that many times its tokens cannot be: known before it is encoded.
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)))
        self.characters_per_token: Final = longest * (1 if self.backend.normalizer is None else MAX_SHRINKING)
        self.vocab_size: Final = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def has_chat_template(self) -> bool:
        return self.template.exists

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation. `variables` (`tools`, `enable_thinking`, ...) are what the template sees.

        Raises ChatTemplateError with the template's own words where it refuses the messages.
        """
        return self.template.render(messages, add_generation_prompt, variables)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a finished sequence; ids outside the vocabulary have none. Streams use `detok.Detokenizer`."""
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special)

    def token_text(self, token: int) -> str:
        """One token as text, special ones included; a part of a character reads U+FFFD."""
        return self.pieces.text_of(token)

    def token_bytes(self, token: int) -> bytes:
        """The token's UTF-8 bytes: those of consecutive tokens join to the text's."""
        return self.pieces.bytes_of(token)


def load(folder: Path) -> TextTokenizer:
    """Read `tokenizer.json` and its companions. Raises TokenizerLoadError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerLoadError(f"{folder}: no tokenizer.json (other tokenizer formats are not read)")
    try:
        return TextTokenizer(_quiet_class().from_pretrained(folder, local_files_only=True))
    except TokenizerLoadError as error:
        raise TokenizerLoadError(f"{file}: {error}") from error
    except Exception as error:
        raise TokenizerLoadError(f"{file}: cannot be loaded: {error}") from error


def _quiet_class() -> type[PreTrainedTokenizerFast]:
    # It advises at import to install PyTorch, which this process must not load, and warns when a folder names a
    # tokenizer class of its own; neither says anything about the ids.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # One text at a time is encoded: threads of its own could only take cores from the engines.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import PreTrainedTokenizerFast

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return PreTrainedTokenizerFast
