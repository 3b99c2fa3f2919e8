"""One prompt and what is wanted of it: what the way into a rank is about (steps 4 to 6 of a request's path)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """Made by the handlers' services, placed by the submitter."""

    request_id: str
    caller: str  # the name of the API key
    session: bytes  # what names the conversation
    ids: npt.NDArray[np.int32]
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0
    ignore_eos: bool = False
    reuse: bool = True  # False: compute the whole prompt, whatever is cached
