"""Fake engines and requests for them, as the tests of the engine and of its loop need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.fake import FakeEngine
from engine.fake_settings import FakePace
from ipc.messages import Launch, LinkFds, Sampling, Submit

NO_PACE: Final = FakePace()
PROMPT: Final = list(range(200))


def engine_of(model: Path, pace: FakePace = NO_PACE, *, stateful: bool = False, **fields: Any) -> FakeEngine:
    """An engine of 64 blocks for four sequences, or as `fields` of its launch say."""
    launch = Launch(0, 1, "fake", str(model), LinkFds(0, 0, 0), 0, **{"num_kv_blocks": 64, "max_num_seqs": 4, **fields})
    return FakeEngine(launch, pace, has_states=stateful)


def request(
    slot: int = 0, ids: Sequence[int] = PROMPT, max_tokens: int = 20, *,
    ignore_eos: bool = True, min_tokens: int = 0, **sampling: Any,
) -> Submit:  # fmt: skip
    """Request number `slot`, of generation 1."""
    raw = np.array(ids, "<i4").tobytes()
    return Submit(slot, 1, f"r{slot}", raw, max_tokens, Sampling(**{"seed": 1, **sampling}), min_tokens, ignore_eos)
