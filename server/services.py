"""What handlers share: one value, built by `run.py`, found under one key of the application."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from aiohttp import web

from server.account import Account
from server.config import Config
from server.errors import InvalidRequestError, UnknownModelError
from server.fields import SamplingFields
from server.generate import Generation
from server.metrics import Metrics
from server.rank import Rank
from server.render import Renderer
from server.route import pick
from server.sampling import sampling_of
from server.submit import Submitter
from server.tokenizer.detok import Detokenizer
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import EncodeError
from server.tokenizer.load import TextTokenizer


@dataclass(frozen=True, slots=True)
class Services:
    """The server's parts as handlers see them."""

    config: Config
    tokenizer: TextTokenizer
    encoder: Encoder
    renderer: Renderer
    ranks: Sequence[Rank]
    submitter: Submitter
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str) -> None:
        """An empty name is the served model. Raises UnknownModelError."""
        if name not in ("", self.config.model_name):
            raise UnknownModelError(name, self.config.model_name)

    async def encode(self, text: str, field_name: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """Ids of a text, off the loop when it is long. Raises InvalidRequestError naming the field."""
        try:
            return await self.encoder.encode_async(text, add_special_tokens)
        except EncodeError as error:
            raise InvalidRequestError(f"{field_name}: {error}", field_name) from error

    def start(
        self, call: Call, ids: npt.NDArray[np.int32], request: SamplingFields, max_tokens: int, logprobs: int
    ) -> Generation:
        """Submit one prompt; `max_tokens` is lowered to what the context leaves.

        Raises InvalidRequestError, NotReadyError and OverloadedError.
        """
        room = self.submitter.check(ids, call.prompt_field)
        facts = pick(self.ranks).facts
        assert facts is not None
        stream = self.submitter.submit(
            call.request_id,
            ids,
            min(max_tokens, room),
            sampling_of(request, logprobs, facts.vocab_size),
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
        )
        account = Account(self.metrics, call.request_id, call.endpoint, call.started, len(ids))
        return Generation(stream, Detokenizer(self.tokenizer.pieces), account)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as its parts refer to it."""

    request_id: str
    endpoint: str
    prompt_field: str  # the field that holds the prompt, for error messages
    started: float = field(default_factory=time.monotonic)


SERVICES: Final = web.AppKey("services", Services)
REQUEST_ID: Final = "deepinfer_request_id"
