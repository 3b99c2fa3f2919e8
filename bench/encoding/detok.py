"""Ids to text for many streams at once, one id a stream a step: ours against decoding a window twice a token.

two decodes: transformers' `tokenizer.decode`, as usual. two bare decodes: `tokenizers`' own, without what wraps it.
ours: `Detokenizer`, text out. events: the writer that makes a stream's server-sent events, JSON and all, as the server
uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import PreTrainedTokenizerFast

from bench.baselines.window_text import WindowText
from bench.encoding.conversation import Conversation
from server.events import EventWriters
from server.tokenizer.detok import Detokenizer
from server.tokenizer.load import load

STREAMS: Final = 256
STEPS: Final = 100
HEAD, TAIL = b'data: {"text":', b"}\n\n"

Row = dict[str, object]
Step = Callable[[Sequence[int]], None]


def rows(model: Path) -> list[Row]:
    """A row for each way."""
    tokenizer = load(model)
    fast: Any = PreTrainedTokenizerFast.from_pretrained(model)
    conversation = Conversation(seed=1)
    conversation.grow(STREAMS * STEPS * 6)
    text = "".join(message["content"] for message in conversation.messages)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids[: STREAMS * STEPS]
    steps = np.array(ids).reshape(STREAMS, STEPS).T.tolist()

    def decode(window: list[int]) -> str:
        found: str = tokenizer.backend.decode(window, skip_special_tokens=True)
        return found

    windows = [WindowText(decode) for _ in range(STREAMS)]
    usual = [WindowText(fast.decode) for _ in range(STREAMS)]
    ours = [Detokenizer(tokenizer.pieces) for _ in range(STREAMS)]
    events = EventWriters(tokenizer)
    writers: list[Any] = [events.writer(HEAD, TAIL, skip_empty=False) for _ in range(STREAMS)]
    # Each stream's ids as the server hands them on: one small array a step.
    singles = [list(step.reshape(STREAMS, 1)) for step in np.array(ids, np.int32).reshape(STREAMS, STEPS).T.copy()]
    base = _seconds(steps, lambda step: [one.push(new) for one, new in zip(usual, step, strict=True)])
    taken = {
        "two decodes": base,
        "two bare decodes": _seconds(
            steps, lambda step: [one.push(new) for one, new in zip(windows, step, strict=True)]
        ),
        "ours": _seconds(steps, lambda step: [one.push([token]) for one, token in zip(ours, step, strict=True)]),
        "events": _seconds(singles, lambda step: [one.push(new) for one, new in zip(writers, step, strict=True)]),
    }
    head: Row = {"part": "detok", "streams": STREAMS}
    return [
        {**head, "backend": name, "us_per_token": 1e6 * seconds, "detok_ratio": base / seconds}
        for name, seconds in taken.items()
    ]


def _seconds(steps: Any, work: Callable[[Any], object]) -> float:
    """Of one token."""
    started = time.perf_counter()
    for step in steps:
        work(step)
    return (time.perf_counter() - started) / (STREAMS * STEPS)
