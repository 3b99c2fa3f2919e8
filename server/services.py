"""What handlers share: one value, built by `run.py`, found under one key of the application."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from ipc.messages import Sampling
from server.account import Account, Call
from server.cache import Cache
from server.changes import Changed, Conversations
from server.config import Config
from server.errors import ContextLengthError, InvalidRequestError, ShuttingDownError, UnknownModelError
from server.events import EventWriters
from server.explain import Recent
from server.fields import Message, SamplingFields
from server.generate import Generation
from server.keys import Keys
from server.metrics import Metrics
from server.rank import Rank
from server.render import Renderer
from server.sampling import SEEDS, sampling_of
from server.submit import Submitter
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import EncodeError, EncoderClosedError
from server.tokenizer.load import TextTokenizer
from server.tokenizer.typed import Prompt
from server.turns import Turns
from server.work import Work

Ids = npt.NDArray[np.int32]

# Answers of one request (prompts x n): each takes a slot, so one request must not take them all.
MAX_ANSWERS: Final = 256


@dataclass(frozen=True, slots=True)
class Services:
    """The server's parts as handlers see them."""

    config: Config
    tokenizer: TextTokenizer
    encoder: Encoder
    renderer: Renderer
    writers: EventWriters
    keys: Keys
    ranks: Sequence[Rank]
    submitter: Submitter
    metrics: Metrics
    cache: Cache
    turns: Turns
    conversations: Conversations = field(default_factory=Conversations)
    recent: Recent = field(default_factory=Recent)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str) -> None:
        """An empty name is the served model. Raises UnknownModelError."""
        if name not in ("", self.config.served_model_name):
            raise UnknownModelError(name, self.config.served_model_name)

    async def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """A conversation's prompt; long ones take turns with the rest of the loop. Raises InvalidRequestError."""
        async with self.turns.turn(sum(len(message.text) for message in messages)):
            return self.renderer.render(messages, add_generation_prompt=add_generation_prompt)

    async def encode(self, prompt: str | Prompt, param: str, *, add_special_tokens: bool) -> Ids:
        """Ids of a prompt, off the loop when it is long.

        Raises InvalidRequestError and ContextLengthError naming the field, and ShuttingDownError.
        """
        size = len(prompt if isinstance(prompt, str) else prompt.text)
        self._check_length(size, param)
        await self.turns.breathe(size)
        try:
            ids = await self.encoder.encode_async(prompt, add_special_tokens)
        except EncodeError as error:
            raise InvalidRequestError(f"{param}: {error}", param) from error
        except EncoderClosedError:
            raise ShuttingDownError("the server is shutting down") from None
        await self.turns.breathe(size)
        return ids

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit the context before it costs minutes of encoding. Raises ContextLengthError."""
        longest, limit = self.tokenizer.characters_per_token, self.submitter.facts.max_model_len
        if characters > longest * limit:
            raise ContextLengthError(characters // longest, limit, param, at_least=True)

    def generations(self, asked: Asked, prompts: Sequence[Ids], request: SamplingFields) -> list[Generation]:
        """One for each answer of each prompt, `n` in a row, not yet started; lowers max_tokens to what is left.

        Raises InvalidRequestError, ContextLengthError and NotReadyError.
        """
        if len(prompts) * request.n > MAX_ANSWERS:
            raise InvalidRequestError(
                f"n: {len(prompts)} prompts x n {request.n} are more than {MAX_ANSWERS} answers", "n"
            )
        rooms = [self.submitter.room_after(ids, asked.prompt_field) for ids in prompts]
        sampling = sampling_of(request, asked.logprobs, self.submitter.facts.vocab_size)
        return [
            self._generation(asked, Answer(ids, min(asked.max_tokens, room), choice), sampling, request)
            for ids, room in zip(prompts, rooms, strict=True)
            for choice in range(request.n)
        ]

    def _generation(self, asked: Asked, answer: Answer, sampling: Sampling, request: SamplingFields) -> Generation:
        # Each of n answers draws from a seed of its own; the first from the one that was asked for.
        seed = (sampling.seed + answer.choice) % SEEDS
        work = Work(
            request_id=asked.call.request_id,
            caller=asked.call.caller,
            session=asked.session,
            ids=answer.ids,
            max_tokens=answer.max_tokens,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            reuse=request.prefix_cache,
        )
        account = Account(self.metrics, asked.call, len(answer.ids), asked.changed)
        self.recent.add(account)
        return Generation(self.submitter, work, self.tokenizer.pieces, account, request.stops)

    def manner(self, request: SamplingFields) -> Manner:
        """How the client wants its answer. Raises InvalidRequestError."""
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequestError("stream_options: only allowed when stream is true", "stream_options")
        return Manner(
            stream=request.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            timeout_s=self.config.request_timeout or None,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """How the client wants its answer."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float | None


class Answer(NamedTuple):
    """One answer of a prompt: the `choice`-th of n."""

    ids: Ids
    max_tokens: int
    choice: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What an endpoint made of a request, beside its sampling fields."""

    call: Call
    prompt_field: str  # the field that holds the prompt, for error messages
    session: bytes
    max_tokens: int
    logprobs: int  # as the engine counts: -1 none, k the k best
    changed: Changed | None = None  # the first message that is not what it was a turn before


SERVICES: Final = web.AppKey("services", Services)
CALL: Final = web.RequestKey("call", Call)
"""Of the request; set at the border."""
