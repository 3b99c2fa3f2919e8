"""Step 2: chat messages -> prompt text, by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import InvalidRequestError
from server.fields import Message
from server.tokenizer.errors import ChatTemplateError
from server.tokenizer.load import TextTokenizer


class Renderer:
    """Renders conversations for one model and one thinking mode."""

    def __init__(self, tokenizer: TextTokenizer, thinking_mode: str) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking_mode == "thinking"

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises InvalidRequestError with the template's own words."""
        try:
            return self._tokenizer.render_chat(
                [message.for_template() for message in messages],
                add_generation_prompt=add_generation_prompt,
                # Model families disagree on the name; templates ignore the one they do not know.
                thinking=self._thinking,
                enable_thinking=self._thinking,
            )
        except ChatTemplateError as error:
            raise InvalidRequestError(f"messages: {error}", "messages") from error
