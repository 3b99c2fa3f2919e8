"""The fake engine's sequences as numpy columns, and the arithmetic of its pages.

A step touches no sequence one by one: rows that decode stand side by side until one comes or goes. Knows nothing
about blocks beyond their numbers, or about why a request is there.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.prefix import Prefix
from hicache.keys import PAGE_TOKENS
from ipc.layout import TOKEN_DTYPE
from ipc.messages import Finish, Flag, Submit

U64 = npt.NDArray[np.uint64]

BLOCK_TOKENS: Final = PAGE_TOKENS

GOES_ON, STOP, FULL = (np.uint16(finish) for finish in (Finish.NONE, Finish.STOP, Finish.LENGTH))
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_UNMIX_1: Final = np.uint64(pow(int(_MIX_1), -1, 1 << 64))
_UNMIX_2: Final = np.uint64(pow(int(_MIX_2), -1, 1 << 64))


def mix(values: U64) -> U64:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014), elementwise with wrap-around."""
    values = values + _GOLDEN
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def _unmix(values: U64) -> U64:
    """What `mix` made these of: each of its steps can be undone."""
    values = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    values *= _UNMIX_2
    values ^= values >> np.uint64(27) ^ values >> np.uint64(54)
    values *= _UNMIX_1
    values ^= values >> np.uint64(30) ^ values >> np.uint64(60)
    return values - _GOLDEN


def weighed(entry: U64, positions: npt.NDArray[Any]) -> U64:
    """What entries add to a sequence's digest: it tells where each stands."""
    return entry * (positions.astype(np.uint64) * np.uint64(2) + np.uint64(1))


def entries(tokens: npt.NDArray[np.int32], first_position: int) -> U64:
    """What the pages hold for tokens at consecutive positions."""
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    return mix(tokens.astype(np.uint64) | (positions << np.uint64(32)))


def tokens_of(entry: U64) -> npt.NDArray[np.int32]:
    """The tokens that left these entries."""
    return (_unmix(entry) & np.uint64(0xFFFFFFFF)).astype(np.int32)


class Rows:
    """The sequences that hold blocks as columns, one row each."""

    def __init__(self, count: int, max_blocks: int) -> None:
        self.live = np.zeros(count, np.bool_)
        self.slot = np.zeros(count, np.uint32)
        self.generation = np.zeros(count, np.uint32)
        self.length = np.zeros(count, np.int64)  # prompt + output tokens
        self.rest = np.zeros(count, np.int64)  # prompt tokens not yet in pages
        self.end = np.zeros(count, np.uint64)  # length at which it is full
        self.eos_from = np.zeros(count, np.uint64)  # first position where it may end
        self.may_end = np.zeros(count, np.bool_)
        self.top = np.full(count, -1, np.int64)
        self.seed: U64 = np.zeros(count, np.uint64)
        self.digest: U64 = np.zeros(count, np.uint64)
        self.blocks = np.zeros((count, max_blocks), np.int64)
        self.prompt: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * count
        self.prefix: list[Prefix | None] = [None] * count
        self.held: list[list[int]] = [[] for _ in range(count)]
        self._requests: list[Submit | None] = [None] * count

    def open(self, row: int, request: Submit, prefix: Prefix | None, blocks: list[int], max_model_len: int) -> None:
        ids = np.frombuffer(request.ids, "<i4")
        self.live[row] = True
        self.slot[row], self.generation[row] = request.slot, request.generation
        self.length[row] = self.rest[row] = len(ids)
        self.end[row] = min(len(ids) + request.max_tokens, max_model_len)
        self.eos_from[row] = min(len(ids) + request.min_tokens, max_model_len)
        self.may_end[row] = not request.ignore_eos
        self.top[row] = request.sampling.logprobs
        # Greedy answers must not depend on the seed.
        self.seed[row] = request.sampling.seed if request.sampling.temperature > 0 else 0
        self.blocks[row, : len(blocks)] = blocks
        self.prompt[row] = ids
        self.prefix[row], self.held[row], self._requests[row] = prefix, blocks, request

    def close(self, row: int) -> tuple[Submit, Prefix | None, list[int]]:
        """Free a row; returns what it was opened with."""
        request, prefix, blocks = self._requests[row], self.prefix[row], self.held[row]
        assert request is not None
        self.live[row] = False
        self.prompt[row] = np.empty(0, np.int32)
        self.prefix[row], self.held[row], self._requests[row] = None, [], None
        return request, prefix, blocks

    def find(self, slot: int, generation: int) -> int | None:
        rows = np.flatnonzero(self.live & (self.slot == slot) & (self.generation == generation))
        return int(rows[0]) if len(rows) else None


class Running:
    """The decoding rows side by side, so that a step gathers nothing; made anew when one comes or goes."""

    def __init__(self, table: Rows) -> None:
        rows = self.rows = np.flatnonzero(table.live & (table.rest == 0))
        self.position: U64 = table.length[rows].astype(np.uint64)
        self.digest, self.seed = table.digest[rows], table.seed[rows]
        self.may_end, self.eos_from = table.may_end[rows], table.eos_from[rows]
        self.any_may_end = bool(self.may_end.any())
        self.wants_top = bool((table.top[rows] >= 0).any())
        self._end = table.end[rows]
        # Until then no row is full, so that nobody has to look.
        self._steps_left = int((self._end - self.position).min()) if len(rows) else 0
        self._template = np.zeros(len(rows), TOKEN_DTYPE)
        self._template["slot"], self._template["generation"] = table.slot[rows], table.generation[rows]
        self._template["flags"] = np.where(table.top[rows] >= 0, Flag.TOKEN | Flag.TOP, Flag.TOKEN)
        self._template["finish"] = GOES_ON

    def save(self, table: Rows) -> None:
        """Put back what has moved on."""
        table.length[self.rows] = self.position
        table.digest[self.rows] = self.digest

    def next_blocks(self, table: Rows) -> npt.NDArray[np.int64]:
        """The block of each row's next position."""
        return table.blocks[self.rows, (self.position // np.uint64(BLOCK_TOKENS)).astype(np.int64)]

    def advance(self, entry: U64) -> None:
        """Each row has this entry at its position now."""
        self.digest += weighed(entry, self.position)
        self.position += np.uint64(1)
        self._steps_left -= 1

    def records(self, token: U64, is_eos: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.void]:
        """Records of tokens whose positions have just been passed."""
        records = self._template.copy()
        records["token"], records["position"] = token, self.position - np.uint64(1)
        if is_eos is not None or self._steps_left <= 0:
            finish = np.where(self.position >= self._end, FULL, GOES_ON)
            if is_eos is not None:
                records["flags"] |= np.where(is_eos, np.uint16(Flag.EOS), np.uint16(0))
                finish = np.where(is_eos, STOP, finish)
            records["finish"] = finish
        records["time_ns"] = time.monotonic_ns()
        return records
