"""Which backend encodes for a tokenizer: the fastest that equals `tokenizer.encode` on all probes, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, HfBackend
from server.tokenizer.conditions import why_dependent
from server.tokenizer.errors import BackendRefusedError, BackendUnavailableError, ChatTemplateError
from server.tokenizer.fast import FastBackend
from server.tokenizer.load import TextTokenizer
from server.tokenizer.probes import first_failure, texts
from server.tokenizer.segment import SegmentBackend

AUTO: Final = "auto"
SAMPLE: Final = (
    {"role": "system", "content": "You are helpful.\nAnswer briefly."},
    {"role": "user", "content": " What is the weather in Paris? Use `get_weather`.\n"},
    {"role": "assistant", "content": "I look it up."},
    {"role": "user", "content": "Thanks — 你好 👋\n\n"},
)
SAMPLE_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
)

Maker = Callable[[TextTokenizer], Backend]


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend and the reason in words."""

    backend: Backend
    reason: str


def choose(tokenizer: TextTokenizer, wanted: str = AUTO, makers: Mapping[str, Maker] | None = None) -> Choice:
    """The backend called `wanted`, or the first of `makers` that fits. Slow: it encodes hundreds of probes.

    Raises BackendRefusedError where `wanted` would be wrong or cannot be had, naming the first difference.
    """
    makers = MAKERS if makers is None else makers
    refusals: list[str] = []
    for name in makers if wanted == AUTO else (wanted,):
        made = _tried(tokenizer, makers[name])
        if not isinstance(made, str):
            return Choice(made, "; ".join([*refusals, f"{name} passes all probes"]))
        refusals.append(f"{name}: {made}")
    raise BackendRefusedError("; ".join(refusals))


def _tried(tokenizer: TextTokenizer, make: Maker) -> Backend | str:
    """The backend, or why not."""
    try:
        backend = make(tokenizer)
    except BackendUnavailableError as error:
        return str(error)
    if isinstance(backend, HfBackend):
        return backend
    added = AddedTokens(tokenizer.backend)
    probes = texts(added, _conversation(tokenizer, added))
    return first_failure(backend, HfBackend(tokenizer.backend), probes) or backend


def _segment(tokenizer: TextTokenizer) -> SegmentBackend:
    """Raises BackendUnavailableError."""
    if reason := why_dependent(tokenizer.backend):
        raise BackendUnavailableError(reason)
    return SegmentBackend(tokenizer.backend, AddedTokens(tokenizer.backend))


MAKERS: Final[Mapping[str, Maker]] = {
    "fastokens": lambda tokenizer: FastBackend(tokenizer.backend),
    "segment": _segment,
    "hf": lambda tokenizer: HfBackend(tokenizer.backend),
}


def _conversation(tokenizer: TextTokenizer, added: AddedTokens) -> str:
    """The sample with tools as the template renders it; joined by added tokens where it cannot."""
    for tools in (list(SAMPLE_TOOLS), None):
        for messages in (SAMPLE, SAMPLE[1:]):  # some templates know no system role
            try:
                return tokenizer.render_chat([dict(message) for message in messages], tools=tools)
            except ChatTemplateError:
                continue
    token = next((token.content for token in added.by_id.values() if token.special), "\n")
    return token.join(f"{message['role']}\n{message['content']}" for message in SAMPLE)
