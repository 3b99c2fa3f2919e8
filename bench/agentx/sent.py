"""The ids that a server makes of messages: rendered and encoded with its model folder as the project's server does.

What a prompt has beyond its messages (the template's words) is known from here, before anything is sent. A folder
whose template the measured server does not use gives other counts; the report shows the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.agentx.errors import OptionError
from bench.agentx.prompts import Message, Prompts, opening
from bench.agentx.session import Step
from bench.agentx.words import Words
from server.fields import Message as ServerMessage
from server.render import Renderer
from server.tokenizer.backend import Ids
from server.tokenizer.choose import choose
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import TokenizerError
from server.tokenizer.load import load
from server.tokenizer.reference import Recipe, reference_encoder

# Templates write fewer tokens around a message, and fewer messages of their own: far from a limit nothing is counted.
MOST_WORDS: Final = 64


class Local:
    """Tokenizer, renderer and prompts of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Takes seconds. Raises OptionError, VocabularyError."""
        try:
            tokenizer = load(folder)
            reference = reference_encoder(folder, "chat")
            self._encoder = Encoder(tokenizer, choose(tokenizer).backend, every_control=isinstance(reference, Recipe))
        except TokenizerError as error:
            raise OptionError(f"--tokenizer {folder}: {error}") from error
        if reference is None and not tokenizer.has_chat_template:
            raise OptionError(f"--tokenizer {folder}: it has no chat template")
        self._renderer = Renderer(tokenizer, "chat", reference=reference)
        self.words = Words(tokenizer)
        self.prompts = Prompts(self.words)

    def ids(self, messages: Sequence[Message]) -> Ids:
        """The prompt's ids, shape [tokens]."""
        typed = msgspec.convert(list(messages), list[ServerMessage])
        return self._encoder.encode_prompt(self._renderer.render(typed), add_special_tokens=False)

    def size(self, step: Step, marker: str) -> int:
        """How many tokens the prompt of a step has, without making its text: messages count by their spans."""
        bare = [{"role": span.role, "content": ""} for span in step.spans]
        bare[0]["content"] = opening(marker)
        return step.turn.tokens_in + len(self.ids(bare))

    def fits(self, step: Step, marker: str, limit: int) -> bool:
        """Whether the prompt of a step and its answer have at most `limit` tokens together."""
        least = step.turn.tokens_in + max(step.turn.tokens_out, 1)
        if least > limit or least + MOST_WORDS * (len(step.spans) + MOST_WORDS) <= limit:
            return least <= limit
        return self.size(step, marker) + max(step.turn.tokens_out, 1) <= limit

    def close(self) -> None:
        """End the encoder's threads."""
        self._encoder.close()
