"""One request inside the engine: its tokens, how far they are computed, the blocks that hold their keys and values.

Promises bounded buffers: everything a sequence can ever need is sized when it is added. Knows nothing about torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.native.history import TokenHistory
from engine.prefix import Prefix
from hicache.keys import PAGE_TOKENS
from ipc.messages import Sampling

BLOCK_SIZE = PAGE_TOKENS
"""Tokens per block: the page of the host cache."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold the keys and values of `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what was generated after it.

    `tokens[:length]` are known, `tokens[:computed]` have their keys and values in `table`. The last known token
    of a decoding sequence is always one ahead of `computed`; a preempted sequence starts again at 0, or behind the
    blocks that it may share by then.
    """

    slot: int
    generation: int
    arrival: int  # order of `add`; the lower, the older
    prompt_length: int
    limit: int  # prompt and output together never grow beyond this
    min_tokens: int
    ignore_eos: bool
    sampling: Sampling
    tokens: npt.NDArray[np.int32]  # [limit]
    table: npt.NDArray[np.int32]  # [blocks_for(limit)]
    history: TokenHistory | None = None  # only for penalties
    prefix: Prefix | None = None  # only with a plan for the prefix cache
    length: int = field(init=False)
    computed: int = field(init=False, default=0)
    num_blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length = self.prompt_length

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return self.length - self.computed

    @property
    def loading(self) -> bool:
        """Whether it waits for pages and takes no part in steps."""
        return self.prefix is not None and self.prefix.loading

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return self.length - self.prompt_length

    def append(self, token: int) -> None:
        """Take in a sampled token."""
        self.tokens[self.length] = token
        self.length += 1
        if self.history is not None:
            self.history.append(token)

    def known(self) -> npt.NDArray[np.int32]:
        """The tokens so far."""
        return self.tokens[: self.length]

    def blocks(self) -> list[int]:
        """The blocks it holds, in token order."""
        held: list[int] = self.table[: self.num_blocks].tolist()
        return held
