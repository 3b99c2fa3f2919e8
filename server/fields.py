"""The fields of a request: names, types, ranges, defaults. What is not here is refused by name in `body.py`.

Types only; a client's null means "as if absent" and never reaches these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

# OpenAI's limits where it has them; `logprobs` of completions follows vLLM's default of 20 rather than OpenAI's 5.
Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Below a hundredth a logit divided by it leaves what float32 can hold.
Repetition = Annotated[float, Meta(ge=0.01, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MinCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
# Bounds what is held back of an answer while it could still open a stop string.
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TopLogprobCount = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

DEFAULT_MAX_TOKENS: Final = 4096

# Fields of the API that are not served yet, with the values that ask for nothing and so are fine.
UNSERVED: Final[dict[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "stop_token_ids": ([],),
}

# Labels a client attaches for its own records: they ask nothing of the server.
LABELS: Final = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every chunk carries the counts so far


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and text completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count = DEFAULT_MAX_TOKENS
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Probability = 0.0
    seed: Seed | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0
    logit_bias: dict[str, Bias] = {}
    min_tokens: MinCount = 0
    n: Choices = 1
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = []
    ignore_eos: bool = False
    prefix_cache: bool = True  # our own: false bypasses the cache look-up

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message; the only kind served."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Only an assistant may have said nothing. Raises ValueError."""
        if self.content is None and self.role != "assistant":
            raise ValueError("Object missing required field `content`")

    @property
    def text(self) -> str:
        """Its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: plain text, absent fields absent."""
        found: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobCount = 0


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`; `prompt` is text or token ids, one or many."""

    prompt: str | list[Any]
    logprobs: TopLogprobCount | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation as the chat template renders it."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str = ""
    # Above any context; decoding them holds the loop.
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
