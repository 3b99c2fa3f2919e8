"""An engine without a model: the next id is a function of the seed, the position and every page of the sequence.

It keeps real pages: each token leaves an 8-byte entry in its block, derived from the token and its position, and
the first output of a request is computed from the entries read back. A wrong, missing or stale page therefore
changes the answer. Decoding is vectorised over the running sequences, so that tests and the frontend bench can
drive the server at any speed. Knows nothing about torch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine.fake_rows import BLOCK_TOKENS, GOES_ON, U64, Rows, Running, entries, mix, weighed
from engine.protocol import RequestRefusedError, StepOutput
from ipc.messages import Event, Facts, Flag, Launch, Stats, Submit, TopLogprobs

ENTRY_BYTES: Final = 8
ID_BYTES: Final = 4
# Pool when `--num-kv-blocks` is not given: 1M tokens in 8 MiB.
DEFAULT_BLOCKS: Final = 8192
DEFAULT_MAX_MODEL_LEN: Final = 8192
# One draw in this many ends an answer, so that lengths vary; `ignore_eos` turns it off.
EOS_ODDS: Final = 64


@dataclass(frozen=True, slots=True)
class FakePace:
    """How slow the fake pretends to be; zero is as fast as it can."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0

    @classmethod
    def from_environment(cls) -> FakePace:
        """Read DEEPINFER_FAKE_STEP_MS and DEEPINFER_FAKE_PREFILL_TOKENS_PER_S. Raises ValueError naming them."""
        step_ms = _environment_number("DEEPINFER_FAKE_STEP_MS")
        prefill = _environment_number("DEEPINFER_FAKE_PREFILL_TOKENS_PER_S")
        return cls(step_ms / 1000, 1 / prefill if prefill else 0.0)


def _environment_number(name: str) -> float:
    text = os.environ.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {text!r}")
    return value


class FakeEngine:
    """Implements `engine.protocol.Engine`. A request reserves blocks for its whole length, so none is preempted."""

    def __init__(self, launch: Launch, pace: FakePace | None = None) -> None:
        vocab_size, eos_ids, context = _read_config(Path(launch.model))
        blocks = launch.num_kv_blocks or DEFAULT_BLOCKS
        self._facts = Facts(
            engine="fake",
            model_type="fake",
            dtype="uint64",
            device="cpu",
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            max_model_len=launch.max_model_len or context,
            max_num_seqs=launch.max_num_seqs,
            block_size=BLOCK_TOKENS,
            num_blocks=blocks,
            page_bytes=BLOCK_TOKENS * ENTRY_BYTES,
            layout_digest="fake-1",
        )
        # An answer ends by EOS_ODDS alone: no end of sequence is ever drawn as a word.
        self._words: U64 = np.setdiff1d(np.arange(vocab_size), eos_ids).astype(np.uint64)
        self._pace = pace or FakePace.from_environment()
        self._budget = launch.max_num_batched_tokens
        self._pages: U64 = np.zeros((blocks, BLOCK_TOKENS), np.uint64)
        self._free = list(range(blocks - 1, -1, -1))
        self._waiting: deque[Submit] = deque()
        self._rows = Rows(launch.max_num_seqs, -(-self._facts.max_model_len // BLOCK_TOKENS))
        self._running: Running | None = None
        self._prefilling = False
        self._prefill_tokens = self._decode_tokens = 0

    @property
    def facts(self) -> Facts:
        """See `Engine.facts`."""
        return self._facts

    def add(self, request: Submit) -> None:
        """See `Engine.add`."""
        ids = np.frombuffer(request.ids, "<i4")
        if len(ids) == 0:
            raise RequestRefusedError("the prompt is empty")
        outside = ids[(ids < 0) | (ids >= self._facts.vocab_size)]
        if len(outside):
            raise RequestRefusedError(f"token id {outside[0]} is outside the vocabulary of {self._facts.vocab_size}")
        if len(ids) >= self._facts.max_model_len:
            raise RequestRefusedError(
                f"{len(ids)} prompt tokens leave no room in a context of {self._facts.max_model_len}"
            )
        blocks = self._blocks_for(request)
        if blocks > self._facts.num_blocks:
            raise RequestRefusedError(
                f"{len(ids)} prompt tokens and max_tokens {request.max_tokens} need {blocks} KV blocks, "
                f"the pool has {self._facts.num_blocks}"
            )
        self._waiting.append(request)

    def cancel(self, slot: int, generation: int) -> bool:
        """See `Engine.cancel`."""
        for request in self._waiting:
            if (request.slot, request.generation) == (slot, generation):
                self._waiting.remove(request)
                return True
        row = self._rows.find(slot, generation)
        if row is None:
            return False
        self._release(row)
        return True

    def has_work(self) -> bool:
        """See `Engine.has_work`."""
        return bool(self._waiting) or bool(self._rows.live.any())

    def step(self) -> StepOutput:
        """Prefill what the budget allows, then one token for every prefilled sequence."""
        self._admit()
        prefilled = self._prefill() if self._prefilling else 0
        output = self._decode()
        pause = self._pace.step_s + prefilled * self._pace.prefill_token_s
        if pause:
            time.sleep(pause)
        return output

    def stats(self) -> Stats:
        """See `Engine.stats`."""
        return Stats(
            running=int(self._rows.live.sum()),
            waiting=len(self._waiting),
            blocks_used=self._facts.num_blocks - len(self._free),
            blocks_total=self._facts.num_blocks,
            steps=0,
            preemptions=0,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
        )

    def pages(self) -> npt.NDArray[np.uint8]:
        """See `Engine.pages`."""
        return self._pages.view(np.uint8)

    def close(self) -> None:
        """See `Engine.close`."""

    def _admit(self) -> None:
        idle = np.flatnonzero(~self._rows.live)[::-1].tolist() if self._waiting else []
        while self._waiting and idle and self._blocks_for(self._waiting[0]) <= len(self._free):
            request = self._waiting.popleft()
            blocks = [self._free.pop() for _ in range(self._blocks_for(request))]
            self._rows.open(idle.pop(), request, blocks, self._facts.max_model_len)
            self._prefilling = True

    def _blocks_for(self, request: Submit) -> int:
        tokens = min(len(request.ids) // ID_BYTES + request.max_tokens, self._facts.max_model_len)
        return -(-tokens // BLOCK_TOKENS)

    def _release(self, row: int) -> None:
        self._regroup()
        self._free.extend(self._rows.close(row))

    def _regroup(self) -> None:
        """The decoding rows change: the next step gathers them anew."""
        if self._running is not None:
            self._running.save(self._rows)
            self._running = None

    def _prefill(self) -> int:
        """Write prompt entries in chunks up to the step's budget; returns the tokens written."""
        rows, budget = self._rows, self._budget
        waiting = np.flatnonzero(rows.live & (rows.rest > 0)).tolist()
        for row in waiting:
            chunk = min(int(rows.rest[row]), budget)
            start = int(rows.length[row]) - int(rows.rest[row])
            where = np.arange(start, start + chunk)
            blocks = rows.blocks[row, where // BLOCK_TOKENS]
            self._pages[blocks, where % BLOCK_TOKENS] = entries(rows.prompt[row][start : start + chunk], start)
            rows.rest[row] -= chunk
            budget -= chunk
            if rows.rest[row] == 0:
                self._regroup()
                rows.digest[row] = self._digest(row)
            if budget == 0:
                break
        self._prefilling = bool(waiting) and bool(rows.rest[waiting].any())
        self._prefill_tokens += self._budget - budget
        return self._budget - budget

    def _digest(self, row: int) -> np.uint64:
        where = np.arange(int(self._rows.length[row]))
        read = self._pages[self._rows.blocks[row, where // BLOCK_TOKENS], where % BLOCK_TOKENS]
        return np.uint64(weighed(read, where).sum(dtype=np.uint64))

    def _decode(self) -> StepOutput:
        if self._running is None:
            self._running = Running(self._rows)
        run = self._running
        token, is_eos = self._draw(run)
        entry = mix(token | (run.position << np.uint64(32)))
        self._pages[run.next_blocks(self._rows), run.position % np.uint64(BLOCK_TOKENS)] = entry
        run.digest += weighed(entry, run.position)
        run.position += np.uint64(1)
        records = run.records(token, is_eos)
        events = self._top_logprobs(run, records) if run.wants_top else []
        for row in run.rows[records["finish"] != GOES_ON].tolist():
            self._release(row)
        self._decode_tokens += len(records)
        return StepOutput(records, events)

    def _draw(self, run: Running) -> tuple[U64, npt.NDArray[np.bool_] | None]:
        """The next tokens, and which of them end their answer; None when none may."""
        drawn = mix(run.digest ^ run.seed ^ run.position)
        token = self._words[drawn % np.uint64(len(self._words))]
        if not run.may_end.any() or not self._facts.eos_ids:
            return token, None
        ends = (drawn >> np.uint64(40)) % np.uint64(EOS_ODDS) == 0
        is_eos = ends & run.may_end & (run.position >= run.eos_from)
        return np.where(is_eos, np.uint64(self._facts.eos_ids[0]), token), is_eos

    def _top_logprobs(self, run: Running, records: npt.NDArray[np.void]) -> list[Event]:
        """The fake is always certain: its own token has logprob 0, the runners-up are minus their rank."""
        found: list[Event] = []
        for index in np.flatnonzero(records["flags"] & Flag.TOP).tolist():
            record, count = records[index], int(self._rows.top[run.rows[index]])
            ids = tuple((int(record["token"]) + k) % self._facts.vocab_size for k in range(count))
            ranks = tuple(float(-k) for k in range(count))
            found.append(
                TopLogprobs(int(record["slot"]), int(record["generation"]), int(record["position"]), ids, ranks)
            )
        return found


def _read_config(folder: Path) -> tuple[int, tuple[int, ...], int]:
    """Vocabulary, end-of-sequence ids and context of the model the fake stands in for. Raises OSError, ValueError."""
    file = folder / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_ModelConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: {error}") from error
    eos = config.eos_token_id
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return config.vocab_size, eos_ids, config.max_position_embeddings


class _ModelConfig(msgspec.Struct):
    vocab_size: Annotated[int, msgspec.Meta(ge=2)]
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=2)] = DEFAULT_MAX_MODEL_LEN
