"""Request fields -> the engine's sampling parameters. Checks what types alone cannot say."""

from __future__ import annotations

import secrets
from typing import Final

from ipc.messages import Sampling
from server.errors import InvalidRequestError
from server.fields import SamplingFields

ID_DIGITS: Final = 10  # of the largest int32

SEEDS: Final = 2**64


def sampling_of(request: SamplingFields, logprobs: int, vocab_size: int) -> Sampling:
    """`logprobs` as the engine counts: -1 none, k the k best. Raises InvalidRequestError naming the field."""
    seed = secrets.randbits(64) if request.seed is None else request.seed % SEEDS
    return Sampling(
        seed=seed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_bias(request.logit_bias, vocab_size),
        logprobs=logprobs,
    )


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal alone would take other scripts' digits; int() would take "+1" and "1_0", and fails at 4301 digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= ID_DIGITS and int(key) < vocab_size):
            raise InvalidRequestError(
                f"logit_bias: key {key[:20]!r} is not a token id below {vocab_size}", "logit_bias"
            )
        found[int(key)] = value
    return found
