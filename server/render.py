"""Step 2: chat messages -> the prompt: its text, and the ranges in which special tokens are only text.

Written by the model's reference encoder where it has one, else by its chat template. A conversation that the reference
encoder rejects is written by the chat template, or as lines of "role: text" where there is none, and counted.

A special token that somebody typed stays text, as long as the renderer can tell what was typed: reference encoders
that name their special tokens can; with the others it is found out by rendering twice, only for conversations in which
one is spelled. Where it cannot be told, and with `--special-tokens-in-text keep`, it becomes the token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from server.errors import InvalidRequestError
from server.fields import Message
from server.tokenizer.errors import ChatTemplateError, ReferenceRejectedError
from server.tokenizer.load import TextTokenizer
from server.tokenizer.prefix import Ranges
from server.tokenizer.reference import ReferenceEncoder, Written, between
from server.tokenizer.spans import asked, spans
from server.tokenizer.template import Message as TemplateMessage
from server.tokenizer.typed import Controls, Prompt

log = logging.getLogger(__name__)

Writer = Callable[[list[TemplateMessage]], Written]


class Renderer:
    """Renders conversations for one model and one thinking mode."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        thinking_mode: str,
        *,
        reference: ReferenceEncoder | None = None,
        controls: Controls | None = None,
        on_fallback: Callable[[], None] = lambda: None,
    ) -> None:
        """Without `controls` special tokens are kept. `on_fallback` is told of a rejected conversation."""
        self._tokenizer = tokenizer
        self._thinking = thinking_mode == "thinking"
        self._reference = reference
        self._controls = controls if controls is not None and controls.can_tell else None
        self._on_fallback = on_fallback

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """The prompt. Raises InvalidRequestError with the template's own words."""
        found = [message.for_template() for message in messages]
        try:
            written, write = self._written(found, add_generation_prompt=add_generation_prompt)
            return Prompt(written.text, self._plain(found, written, write))
        except ChatTemplateError as error:
            raise InvalidRequestError(f"messages: {error}", "messages") from error

    def _written(self, messages: list[TemplateMessage], *, add_generation_prompt: bool) -> tuple[Written, Writer]:
        """The prompt and what wrote it."""
        reference = self._reference
        if reference is None:
            return _by(lambda messages: Written(self._templated(messages, add_generation_prompt), None), messages)
        if not add_generation_prompt:
            raise InvalidRequestError(
                f"add_generation_prompt: {reference.name} always opens the answer", "add_generation_prompt"
            )
        try:
            return _by(reference.write, messages)
        except ReferenceRejectedError as error:
            log.info("a conversation is written by the plain fallback: %s", error)
            self._on_fallback()
            return _by(lambda messages: Written(self._fallback(messages), None), messages)

    def _templated(self, messages: list[TemplateMessage], add_generation_prompt: bool) -> str:
        return self._tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            # Model families disagree on the name; templates ignore the one they do not know.
            thinking=self._thinking,
            enable_thinking=self._thinking,
        )

    def _fallback(self, messages: list[TemplateMessage]) -> str:
        if self._tokenizer.has_chat_template:
            return self._templated(messages, True)
        lines = [f"{message['role']}: {message['content']}\n\n" for message in messages]
        return "".join([*lines, "assistant:"])

    def _plain(self, messages: list[TemplateMessage], written: Written, write: Writer) -> Ranges:
        """The ranges to protect; none in a conversation that spells no special token."""
        if self._controls is None or not asked(messages, self._controls.may_spell):
            return ()
        if written.special is not None:
            return between(written.special, len(written.text))
        found = spans(messages, written.text, self._controls.may_spell, lambda marked: write(marked).text)
        if found is None:
            log.info("what was typed cannot be told from what the template wrote: special tokens in it count")
        return found or ()


def _by(write: Writer, messages: list[TemplateMessage]) -> tuple[Written, Writer]:
    return write(messages), write
