"""Admission: a prompt gets a rank, a slot and a place in that rank's ring, or a typed refusal. Step 6.

Never waits: a full table or ring is a 503, so an overload is the client's to retry and not ours to hoard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ipc.messages import Sampling, Submit
from server.errors import ContextLengthError, InvalidRequestError, OverloadedError, ShuttingDownError
from server.rank import Rank
from server.route import pick
from server.stream import TokenStream


class Submitter:
    """Places requests on the ranks it is given."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self.closed = False  # True once the server is going down

    def check(self, ids: npt.NDArray[np.int32], param: str) -> int:
        """How many tokens the context leaves for the answer.

        Raises NotReadyError, ContextLengthError, and InvalidRequestError for an empty prompt or an id outside
        the vocabulary; `param` names the field in the message.
        """
        if self.closed:
            raise ShuttingDownError("the server is shutting down")
        facts = pick(self._ranks).facts
        assert facts is not None  # a ready rank has told them
        if len(ids) == 0:
            raise InvalidRequestError(f"{param}: the prompt has no tokens", param)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= facts.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"{param}: token id {wrong} is outside the vocabulary of {facts.vocab_size}", param
            )
        if len(ids) >= facts.max_model_len:
            raise ContextLengthError(len(ids), facts.max_model_len, param)
        return facts.max_model_len - len(ids)

    def submit(
        self, request_id: str, ids: npt.NDArray[np.int32], max_tokens: int, sampling: Sampling, *,
        min_tokens: int = 0, ignore_eos: bool = False,
    ) -> TokenStream:  # fmt: skip
        """Start a request. The caller must read the stream to its end or cancel it.

        Raises NotReadyError, ShuttingDownError and OverloadedError.
        """
        if self.closed:
            raise ShuttingDownError("the server is shutting down")
        rank = pick(self._ranks)
        stream = TokenStream()
        place = rank.slots.take(stream)
        if place is None:
            raise OverloadedError(f"rank {rank.index} holds all the requests it can")
        slot, generation = place
        prompt = ids.astype("<i4", copy=False).tobytes()
        request = Submit(slot, generation, request_id, prompt, max_tokens, sampling, min_tokens, ignore_eos)
        if not rank.submit(stream, slot, request):
            raise OverloadedError(f"the submit ring of rank {rank.index} is full")
        return stream
