"""Which ids a request has seen, and how often it generated each: what the penalties need.

Only kept for requests that ask for a penalty; dense over the vocabulary, because a flat scan of 130K bytes
costs microseconds while a dictionary of a long prompt costs milliseconds a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """`seen[id]`: in prompt or output (repetition penalty). `counts[id]`: times in the output (the other two)."""

    def __init__(self, vocab_size: int, prompt: npt.NDArray[np.int32]) -> None:
        self.seen = np.zeros(vocab_size, dtype=np.bool_)
        self.seen[prompt] = True
        self.counts = np.zeros(vocab_size, dtype=np.int32)

    def append(self, token: int) -> None:
        """Record one generated token."""
        self.seen[token] = True
        self.counts[token] += 1
