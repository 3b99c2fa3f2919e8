"""A tokenizer's chat template: messages -> the prompt's text, as `apply_chat_template` gives it.

Plain messages, which nearly all are, go straight to the compiled template: preparing them for media and tools costs as
much as rendering them. It is used only where it gave the same text at the start. Knows nothing about requests.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

from server.tokenizer.errors import ChatTemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerFast

# What a template raises at messages it was not written for: Jinja's own errors, and Python's from its expressions.
TEMPLATE_FAILURES: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
# Arguments of apply_chat_template that a template may see as variables; its other parameters steer the call itself.
TEMPLATE_INPUTS: Final = frozenset({"tools", "documents"})
# Fields of a message that nothing has to be done to before a template sees it, if they are text.
PLAIN_FIELDS: Final = frozenset({"role", "content", "name", "tool_call_id"})
SAMPLE: Final = ({"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello 👋"})

Message = dict[str, Any]


class ChatTemplate:
    """The template of one tokenizer. Thread-safe."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast
        self._reserved = frozenset(inspect.signature(fast.apply_chat_template).parameters) - TEMPLATE_INPUTS
        self._given: Mapping[str, Any] = {"tools": None, "documents": None, **fast.special_tokens_map}
        self._compiled = _compiled(fast)
        if self._compiled is not None and not self._agrees():
            self._compiled = None

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self._fast.chat_template is not None

    @property
    def direct(self) -> bool:
        """Whether plain messages take the short way."""
        return self._compiled is not None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises ChatTemplateError with the template's own words where it refuses the messages."""
        if not self.exists:
            raise ChatTemplateError("the model has no chat template")
        if taken := self._reserved.intersection(variables):
            raise ChatTemplateError(f"{min(taken)!r} is not a variable of a chat template")
        try:
            if self._compiled is not None and messages and not TEMPLATE_INPUTS & variables.keys() and _plain(messages):
                return self._directly(messages, add_generation_prompt, variables)
            return self._applied(messages, add_generation_prompt, variables)
        except TEMPLATE_FAILURES as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error

    def _directly(self, messages: Sequence[Message], add: bool, variables: Mapping[str, Any]) -> str:
        assert self._compiled is not None
        return self._compiled.render(
            {**self._given, **variables, "messages": list(messages), "add_generation_prompt": add}
        )

    def _applied(self, messages: Sequence[Message], add: bool, variables: Mapping[str, Any]) -> str:
        text = self._fast.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add, **variables)
        assert isinstance(text, str)
        return text

    def _agrees(self) -> bool:
        return all(
            _outcome(self._directly, messages, add) == _outcome(self._applied, messages, add)
            for messages in (SAMPLE, SAMPLE[:1])
            for add in (True, False)
        )


def _outcome(render: Any, messages: Sequence[Message], add: bool) -> str | None:
    try:
        text = render(messages, add, {})
    except TEMPLATE_FAILURES:
        return None
    assert isinstance(text, str)
    return text


def _plain(messages: Sequence[Message]) -> bool:
    return all(
        PLAIN_FIELDS.issuperset(message) and all(type(value) is str for value in message.values())
        for message in messages
    )


def _compiled(fast: PreTrainedTokenizerFast) -> Template | None:
    """The template as `transformers` compiles it; None where there is none, or not one, or not to be had that way."""
    if not isinstance(fast.chat_template, str):
        return None
    module = importlib.import_module("transformers.utils.chat_template_utils")
    # Not a public name, so it may go; then messages take the long way.
    make = getattr(module, "_compile_jinja_template", None)
    try:
        return None if make is None else make(fast.chat_template)
    except TemplateError:  # said to the client who uses it
        return None
