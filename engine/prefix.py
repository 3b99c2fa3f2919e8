"""One request's side of the prefix cache: its plan, the keys of its pages, and how far the plan has been carried out.

Promises that a plan is answered by one CacheLoaded, and by one CacheStored if it has anything to store. Moves no
byte and holds no block: `engine/offload.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.keys import KEY_BYTES, PAGE_TOKENS, extend
from ipc.messages import CacheLoaded, CachePlan, CacheStored, Event

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]


@dataclass(eq=False, slots=True)
class Prefix:
    """The pages of one request, from its first token on. Raises ValueError for a plan that does not fit the prompt."""

    plan: CachePlan
    prompt: Int32  # [n]
    keep_tokens: int
    epoch: int  # of the offload when the request came: pages of an older one are not made known
    keys: list[bytes] = field(init=False)  # of the prompt's whole pages, later also of generated ones
    slots: UInt32 = field(init=False)  # host pages to load, from page 0 on
    sums: UInt64 = field(init=False)  # their checksums, or nothing
    shared: int = 0  # pages that were on the device when it was admitted
    pages: int = 0  # pages that can be reused: `shared`, and what has been loaded behind them
    started: bool = False  # it was admitted once; its loads are never done again
    loading: bool = False
    computed: bool = False  # the whole prompt is, with finite logits
    deferred: bool = False
    bad: int = -1
    error: str = ""

    def __post_init__(self) -> None:
        plan, pages = self.plan, len(self.prompt) // PAGE_TOKENS
        self.keys = split(plan.keys)
        self.slots = np.frombuffer(plan.load, "<u4")
        self.sums = np.frombuffer(plan.load_sums, "<u8")
        if len(self.keys) != pages:
            raise ValueError(f"plan {plan.plan} has {len(self.keys)} keys for {pages} pages")
        if len(self.slots) * PAGE_TOKENS > max(0, len(self.prompt) - self.keep_tokens):
            raise ValueError(f"plan {plan.plan} loads {len(self.slots)} pages of {len(self.prompt)} tokens")
        if plan.store_from + len(plan.store) // 4 > pages:
            raise ValueError(f"plan {plan.plan} stores pages beyond the {pages} of its prompt")

    @property
    def prompt_pages(self) -> int:
        """Whole pages of the prompt."""
        return len(self.prompt) // PAGE_TOKENS

    def wants_load(self, has_states: bool) -> bool:
        """Whether anything of what may be reused has to come from the host."""
        return self.shared < len(self.slots) or (has_states and len(self.slots) > 0)

    def extend(self, tokens: Int32) -> None:
        """Make keys for all whole pages of `tokens`, which begin with the prompt."""
        known, pages = len(self.keys), len(tokens) // PAGE_TOKENS
        if pages > known:
            parent = self.keys[-1] if self.keys else self.plan.root
            self.keys += split(extend(parent, tokens[known * PAGE_TOKENS : pages * PAGE_TOKENS]))

    def loaded(self) -> CacheLoaded:
        """What was reused, to be told once."""
        device = min(self.shared, self.pages)
        return CacheLoaded(
            self.plan.plan,
            device_tokens=device * PAGE_TOKENS,
            host_tokens=(self.pages - device) * PAGE_TOKENS,
            deferred=self.deferred,
            bad=self.bad,
            error=self.error,
        )


def split(keys: bytes) -> list[bytes]:
    """Keys one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def stores_anything(plan: CachePlan) -> bool:
    """Whether the plan is owed a CacheStored."""
    return bool(plan.store or plan.store_states)


def unused(plan: CachePlan) -> list[Event]:
    """The answers to a plan whose request never started."""
    answers: list[Event] = [CacheLoaded(plan.plan)]
    if stores_anything(plan):
        answers.append(CacheStored(plan.plan))
    return answers
