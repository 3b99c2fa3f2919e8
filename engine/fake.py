"""An engine without a model: the next id is a function of the seed, the position and every page of the sequence.

It keeps real pages: each token leaves an 8-byte entry in its block, derived from the token and its position, and
the first output of a request is computed from the entries read back. A wrong, missing or stale page therefore
changes the answer. Decoding is vectorised over the running sequences, so that tests and the frontend bench can
drive the server at any speed. Knows nothing about torch.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.blocks import BlockManager
from engine.fake_memory import FakeMemory
from engine.fake_rows import BLOCK_TOKENS, GOES_ON, U64, Rows, Running, mix
from engine.fake_settings import FakeModel, FakePace, facts_of, states_wanted
from engine.offload import Offload
from engine.prefix import Int32, Prefix
from engine.protocol import RequestRefusedError, StartError, StepOutput
from hicache.opening import open_transfer
from hicache.pool import HostPool
from ipc.messages import CacheStore, Event, Facts, Flag, Launch, Stats, Submit, TopLogprobs

ID_BYTES: Final = 4
# Pool when `--num-kv-blocks` is not given: 1M tokens in 8 MiB.
DEFAULT_BLOCKS: Final = 8192
# One draw in this many ends an answer, so that lengths vary; `ignore_eos` turns it off.
EOS_ODDS: Final = 64


class _Waiting(NamedTuple):
    request: Submit
    prefix: Prefix | None

    @property
    def prompt(self) -> Int32:
        return np.frombuffer(self.request.ids, "<i4")


class FakeEngine:
    """Implements `engine.protocol.Engine`. A request reserves blocks for its whole length, so none is preempted.

    `has_states` (else DEEPINFER_FAKE_STATES=1) is a model whose prefixes are pages and a state behind them.
    """

    def __init__(self, launch: Launch, pace: FakePace | None = None, *, has_states: bool | None = None) -> None:
        try:
            model = FakeModel.read(Path(launch.model))
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from error
        blocks = launch.num_kv_blocks or DEFAULT_BLOCKS
        stateful = states_wanted() if has_states is None else has_states
        self._memory = FakeMemory(blocks, launch.max_num_seqs, has_states=stateful)
        self._facts = facts_of(launch, model, blocks, stateful)
        # An answer ends by EOS_ODDS alone: no end of sequence is ever drawn as a word.
        self._words: U64 = np.setdiff1d(np.arange(model.vocab_size), model.eos_ids).astype(np.uint64)
        self._pace = pace or FakePace.from_environment()
        self._budget = launch.max_num_batched_tokens
        self._blocks = BlockManager(blocks)
        staging = self._memory.states.staging if self._memory.states is not None else None
        self._offload = Offload(self._blocks, keep_tokens=self._facts.keep_tokens, staging=staging)
        self._waiting: deque[_Waiting] = deque()
        self._rows = Rows(launch.max_num_seqs, -(-self._facts.max_model_len // BLOCK_TOKENS))
        self._loading: dict[int, Prefix] = {}  # by row: these take no part in steps
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
        self._waiting.append(_Waiting(request, self._offload.open(request.cache, ids)))

    def cancel(self, slot: int, generation: int) -> bool:
        """See `Engine.cancel`."""
        for waiting in self._waiting:
            if (waiting.request.slot, waiting.request.generation) == (slot, generation):
                self._waiting.remove(waiting)
                self._offload.close(waiting.prefix)
                return True
        row = self._rows.find(slot, generation)
        if row is None:
            return False
        self._release(row)
        return True

    def attach(self, pool: HostPool) -> None:
        """See `Engine.attach`. Raises TransferError."""
        states = self._memory.states.rows if self._memory.states is not None else None
        self._offload.attach(open_transfer(self._memory.pages, states, pool), self._facts.page_bytes)

    def store(self, command: CacheStore) -> None:
        """See `Engine.store`."""
        self._offload.store(command)

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._offload.forget()

    def has_work(self) -> bool:
        """See `Engine.has_work`."""
        return bool(self._waiting) or self._offload.busy or bool(self._rows.live.any())

    def step(self) -> StepOutput:
        """Prefill what the budget allows, then one token for every prefilled sequence."""
        self._offload.pump(decoding=self._running is not None and len(self._running.rows) > 0)
        self._start_loaded()
        self._admit()
        prefilled = self._prefill() if self._prefilling else 0
        records, tops = self._decode()
        pause = self._pace.step_s + prefilled * self._pace.prefill_token_s
        if not prefilled and not len(records):
            self._offload.rest()
        elif pause:
            time.sleep(pause)
        return StepOutput(records, self._offload.take_events() + tops)

    def stats(self) -> Stats:
        """See `Engine.stats`."""
        return Stats(
            running=int(self._rows.live.sum()),
            waiting=len(self._waiting),
            blocks_used=self._blocks.used,
            blocks_total=self._blocks.total,
            blocks_cached=self._blocks.cached,
            steps=0,
            preemptions=0,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
        )

    def pages(self) -> npt.NDArray[np.uint8]:
        """See `Engine.pages`."""
        return self._memory.pages

    def close(self) -> None:
        """See `Engine.close`."""
        self._offload.detach()

    def _admit(self) -> None:
        idle = np.flatnonzero(~self._rows.live)[::-1].tolist() if self._waiting else []
        while self._waiting and idle:
            request, prefix = self._waiting[0]
            shared = self._offload.find(prefix, self._waiting[0].prompt)
            count = self._blocks_for(request)
            if count - len(shared) + self._blocks.idle(shared) > self._blocks.free:
                if prefix is not None:
                    prefix.deferred = True
                return
            self._waiting.popleft()
            self._open(idle.pop(), request, prefix, shared, count)

    def _open(self, row: int, request: Submit, prefix: Prefix | None, shared: list[int], count: int) -> None:
        self._blocks.share(shared)
        blocks = shared + [self._blocks.take() for _ in range(count - len(shared))]
        self._rows.open(row, request, prefix, blocks, self._facts.max_model_len)
        self._offload.begin(prefix, len(shared), np.array(blocks, np.int32), self._memory.state_row(row))
        if prefix is not None and (prefix.loading or prefix.pages < prefix.shared):
            self._loading[row] = prefix
        else:
            self._start(row, prefix.pages if prefix is not None else 0)

    def _start_loaded(self) -> None:
        for row in [row for row, prefix in self._loading.items() if not prefix.loading]:
            prefix = self._loading.pop(row)
            if prefix.pages < prefix.shared:
                # Its load failed, and shared blocks are not its own to compute into.
                self._waiting.appendleft(self._close(row))
            else:
                self._start(row, prefix.pages)

    def _start(self, row: int, pages: int) -> None:
        """The first `pages` are there, the rest is to be computed."""
        self._rows.rest[row] -= pages * BLOCK_TOKENS
        if pages == 0:
            self._memory.start(row)
        self._prefilling = True

    def _blocks_for(self, request: Submit) -> int:
        tokens = min(len(request.ids) // ID_BYTES + request.max_tokens, self._facts.max_model_len)
        return -(-tokens // BLOCK_TOKENS)

    def _release(self, row: int) -> None:
        """Its request is gone."""
        self._offload.close(self._rows.prefix[row])
        self._loading.pop(row, None)
        self._close(row)

    def _close(self, row: int) -> _Waiting:
        self._regroup()
        request, prefix, blocks = self._rows.close(row)
        self._blocks.give_back(blocks)
        return _Waiting(request, prefix)

    def _finish(self, row: int) -> None:
        """Its answer is complete."""
        self._regroup()
        prefix = self._rows.prefix[row]
        if prefix is not None:
            ids = self._memory.tokens(self._rows, row)
            self._offload.end(prefix, ids, self._rows.held[row], self._memory.state_row(row))
        self._release(row)

    def _regroup(self) -> None:
        """The decoding rows change: the next step gathers them anew."""
        if self._running is not None:
            self._running.save(self._rows)
            self._running = None

    def _prefill(self) -> int:
        """Write prompt entries in chunks up to the step's budget; returns the tokens written."""
        rows, budget = self._rows, self._budget
        waiting = [row for row in np.flatnonzero(rows.live & (rows.rest > 0)).tolist() if row not in self._loading]
        for row in waiting:
            chunk = min(int(rows.rest[row]), budget)
            self._memory.write(rows, row, int(rows.length[row]) - int(rows.rest[row]), chunk)
            rows.rest[row] -= chunk
            budget -= chunk
            if rows.rest[row] == 0:
                self._prefilled(row)
            if budget == 0:
                break
        self._prefilling = bool(waiting) and bool(rows.rest[waiting].any())
        self._prefill_tokens += self._budget - budget
        return self._budget - budget

    def _prefilled(self, row: int) -> None:
        rows = self._rows
        self._regroup()
        rows.digest[row] = self._memory.digest(rows, row)
        self._offload.computed(rows.prefix[row], rows.held[row], self._memory.state_row(row))

    def _decode(self) -> tuple[npt.NDArray[np.void], list[Event]]:
        if self._running is None:
            self._running = Running(self._rows)
        run = self._running
        token, is_eos = self._draw(run)
        self._memory.append(self._rows, run, token)
        records = run.records(token, is_eos)
        events = self._top_logprobs(run, records) if run.wants_top else []
        for row in run.rows[records["finish"] != GOES_ON].tolist():
            self._finish(row)
        self._decode_tokens += len(records)
        return records, events

    def _draw(self, run: Running) -> tuple[U64, npt.NDArray[np.bool_] | None]:
        """The next tokens, and which of them end their answer; None when none may."""
        drawn = mix(run.digest ^ run.seed ^ run.position)
        token = self._words[drawn % np.uint64(len(self._words))]
        if not run.any_may_end or not self._facts.eos_ids:
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
