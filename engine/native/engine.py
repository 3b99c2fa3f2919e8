"""The native engine: `engine/protocol.py` over scheduler, runner and sampler.

Promises that a request's tokens do not depend on the requests beside it beyond rounding, and that a request that
ended or was cancelled holds nothing. Knows nothing about HTTP, text or shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.blocks import BlockManager
from engine.native.adjust import Row, needs_history
from engine.native.architecture import context_length
from engine.native.batch import Batch, build
from engine.native.device import choose_device, choose_threads
from engine.native.errors import LaunchError
from engine.native.history import TokenHistory
from engine.native.loading import LoadedModel, load, read_config
from engine.native.memory import check_blocks, choose_blocks, cpu_bytes, cuda_bytes
from engine.native.pages import PageLayout, PagePool
from engine.native.probe import full_step, probe_layout
from engine.native.runner import Runner
from engine.native.sampler import Sampler, Samples
from engine.native.scheduler import Scheduler
from engine.native.sequence import BLOCK_SIZE, Sequence, blocks_for
from engine.offload import Offload
from engine.protocol import RequestRefusedError, StepOutput
from hicache.opening import open_transfer
from hicache.pool import HostPool
from hicache.transfer import TransferError
from ipc.layout import TOKEN_DTYPE
from ipc.messages import CacheStore, Event, Facts, Finish, Flag, Launch, RequestError, Stats, Submit, TopLogprobs

# Copies between memories of the same machine: a few threads fill its bandwidth.
MAX_COPY_THREADS: Final = 4
# On a CPU a longer step computes no faster, and whoever decodes, leaves or arrives waits for its end.
CPU_PROMPT_TOKENS: Final = 512

Observer = Callable[[Batch, torch.Tensor], None]
"""Sees every step's batch and its logits before they are adjusted; must not keep the tensor."""


class NativeEngine:
    """One model on one device. Raises NativeEngineError when it cannot come up."""

    def __init__(self, launch: Launch, observe: Observer | None = None) -> None:
        folder = Path(launch.model)
        config = read_config(folder)
        max_model_len = context_length(config, launch.max_model_len)
        device = choose_device(launch.device, launch.rank)
        torch.set_num_threads(choose_threads(launch.threads, launch.world))
        loaded = load(folder, config, launch.dtype, device)
        layout = probe_layout(loaded, device)
        num_blocks = launch.num_kv_blocks or _measured_blocks(launch, loaded, layout, max_model_len, device)
        if device.type == "cpu":
            check_blocks(num_blocks, layout.page_bytes)
        self._pool = PagePool(layout, num_blocks, device)
        self._blocks = BlockManager(num_blocks, self._pool.clear)
        self._offload = Offload(self._blocks)
        self._scheduler = Scheduler(
            self._blocks,
            self._offload,
            launch.max_num_seqs,
            launch.max_num_batched_tokens,
            CPU_PROMPT_TOKENS if device.type == "cpu" else None,
        )
        self._runner = Runner(loaded.model, self._pool)
        self._sampler = Sampler(loaded.eos_ids)
        self._observe = observe
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._arrivals = self._steps = self._prefill_tokens = self._decode_tokens = 0
        self._facts = Facts(
            engine="native",
            model_type=config.model_type,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=device.type,
            vocab_size=loaded.vocab_size,
            eos_ids=loaded.eos_ids,
            max_model_len=max_model_len,
            max_num_seqs=launch.max_num_seqs,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            page_bytes=layout.page_bytes,
            layout_digest=layout.digest,
        )

    @property
    def facts(self) -> Facts:
        """Constant from the first call on."""
        return self._facts

    def add(self, request: Submit) -> None:
        """Queue a request; it takes part from the next step on. Raises RequestRefusedError."""
        prompt = self._checked_prompt(request)
        # The last token needs no keys and values: nothing is computed after it.
        in_pool = self._facts.num_blocks * BLOCK_SIZE + 1
        limit = min(prompt.size + request.max_tokens, self._facts.max_model_len, in_pool)
        tokens = np.empty(limit, dtype=np.int32)
        tokens[: prompt.size] = prompt
        key = (request.slot, request.generation)
        assert key not in self._sequences, f"slot {request.slot} generation {request.generation} is in use"
        sequence = Sequence(
            slot=request.slot,
            generation=request.generation,
            arrival=self._arrivals,
            prompt_length=prompt.size,
            limit=limit,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            sampling=request.sampling,
            tokens=tokens,
            table=np.empty(blocks_for(limit), dtype=np.int32),
            history=TokenHistory(self._facts.vocab_size, prompt) if needs_history(request.sampling) else None,
            prefix=self._offload.open(request.cache, prompt),
        )
        self._arrivals += 1
        self._sequences[key] = sequence
        self._scheduler.add(sequence)

    def _checked_prompt(self, request: Submit) -> npt.NDArray[np.int32]:
        facts = self._facts
        prompt = np.frombuffer(request.ids, dtype="<i4")
        if not prompt.size:
            raise RequestRefusedError("the prompt is empty")
        if request.max_tokens < 1:
            raise RequestRefusedError(f"max_tokens is {request.max_tokens}, must be at least 1")
        if prompt.size >= facts.max_model_len:
            raise RequestRefusedError(
                f"the prompt has {prompt.size} tokens, the context of {facts.max_model_len} holds no further one"
            )
        if blocks_for(prompt.size) > facts.num_blocks:
            raise RequestRefusedError(
                f"the prompt has {prompt.size} tokens, the pool of {facts.num_blocks} blocks holds "
                f"{facts.num_blocks * BLOCK_SIZE}"
            )
        outside = prompt[(prompt < 0) | (prompt >= facts.vocab_size)]
        if outside.size:
            raise RequestRefusedError(f"prompt id {outside[0]} is outside the vocabulary of {facts.vocab_size}")
        for token in request.sampling.logit_bias:
            if not 0 <= token < facts.vocab_size:
                raise RequestRefusedError(f"logit_bias id {token} is outside the vocabulary of {facts.vocab_size}")
        return prompt

    def cancel(self, slot: int, generation: int) -> bool:
        """Drop a request and free all it held. False: it is not here (it ended before)."""
        sequence = self._sequences.get((slot, generation))
        if sequence is None:
            return False
        self._drop(sequence)
        return True

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.slot, sequence.generation]
        self._offload.close(sequence.prefix)
        self._scheduler.remove(sequence)

    def attach(self, pool: HostPool) -> None:
        """Use this host pool from now on; before the first request. Raises LaunchError where it cannot be pinned."""
        pages = self.pages()
        try:
            transfer = open_transfer(self._pool.bytes if pages is None else pages, None, pool, _copy_threads())
        except TransferError as error:
            raise LaunchError(f"the host pool cannot be used: {error}") from error
        self._offload.attach(transfer, self._facts.page_bytes)

    def store(self, command: CacheStore) -> None:
        """Copy offered pages to the host; the answer is among the events of a later step."""
        self._offload.store(command)

    def forget(self) -> None:
        """Reuse no block whose page is known now."""
        self._offload.forget()

    def has_work(self) -> bool:
        """Whether a step would do anything; also copies and events that wait count."""
        return bool(self._sequences) or self._offload.busy

    def step(self) -> StepOutput:
        """Run one batch: decodes and prompt chunks. Ends of requests are in the records, their blocks are free."""
        self._offload.pump(decoding=self._scheduler.decoding)
        spans = self._scheduler.plan()
        if not spans:
            self._offload.rest()
            return StepOutput(np.empty(0, dtype=TOKEN_DTYPE), self._offload.take_events())
        batch = build(spans)
        logits = self._runner.forward(batch)
        if self._observe is not None:
            self._observe(batch, logits)
        for sequence, count in spans:
            sequence.computed += count
        self._steps += 1
        self._decode_tokens += batch.num_decodes
        self._prefill_tokens += len(batch.ids) - batch.num_decodes
        return self._publish(batch.sampled, logits)

    def _publish(self, sampled: tuple[Sequence, ...], logits: torch.Tensor) -> StepOutput:
        """Draw, take the tokens in, end what has ended."""
        records = np.zeros(len(sampled), dtype=TOKEN_DTYPE)
        events: list[Event] = []
        if not sampled:
            return StepOutput(records, self._offload.take_events())
        samples = self._sampler.sample(logits, [_row(sequence) for sequence in sampled])
        records["logprob"] = samples.logprobs
        records["time_ns"] = time.monotonic_ns()
        for index, sequence in enumerate(sampled):
            record = records[index]
            record["slot"], record["generation"] = sequence.slot, sequence.generation
            record["position"] = sequence.length
            if samples.finite[index]:
                self._take_in(sequence, index, samples, record, events)
            else:
                self._break_off(sequence, record, events)
        return StepOutput(records, self._offload.take_events() + events)

    def _take_in(self, sequence: Sequence, index: int, samples: Samples, record: np.void, events: list[Event]) -> None:
        self._offload.computed(sequence.prefix, sequence.blocks())
        token = int(samples.tokens[index])
        flags, finish = Flag.TOKEN, Finish.NONE
        if index in samples.tops:
            top = samples.tops[index]
            flags |= Flag.TOP
            events.append(TopLogprobs(sequence.slot, sequence.generation, sequence.length, top.ids, top.logprobs))
        sequence.append(token)
        if token in self._facts.eos_ids:
            flags |= Flag.EOS
            finish = Finish.NONE if sequence.ignore_eos else Finish.STOP
        if finish is Finish.NONE and sequence.length == sequence.limit:
            finish = Finish.LENGTH
        record["token"], record["flags"], record["finish"] = token, flags, finish
        if finish is not Finish.NONE:
            self._offload.end(sequence.prefix, sequence.tokens[: sequence.computed], sequence.blocks())
            self._drop(sequence)

    def _break_off(self, sequence: Sequence, record: np.void, events: list[Event]) -> None:
        """End a request whose logits are not finite; its blocks are cleaned: the next owner reads them masked."""
        message = f"the model's logits at position {sequence.length} are not finite"
        events.append(RequestError(sequence.slot, sequence.generation, message, client_fault=False))
        record["logprob"], record["finish"] = 0, Finish.ERROR
        self._blocks.spoil(sequence.blocks())
        self._drop(sequence)

    def stats(self) -> Stats:
        """Gauges and counters of this moment."""
        return Stats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            blocks_used=self._blocks.used,
            blocks_total=self._blocks.total,
            blocks_cached=self._blocks.cached,
            steps=self._steps,
            preemptions=self._scheduler.preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
        )

    def pages(self) -> npt.NDArray[np.uint8] | None:
        """The block pool as host bytes `[num_blocks, page_bytes]`, without a copy; None where it lies on a device."""
        if self._pool.bytes.device.type != "cpu":
            return None
        return self._pool.bytes.numpy()

    def close(self) -> None:
        """Give back device memory. The engine is not used afterwards."""
        self._sequences.clear()
        self._offload.detach()
        del self._runner, self._pool
        if self._facts.device == "cuda":
            torch.cuda.empty_cache()


def _copy_threads() -> int:
    return min(MAX_COPY_THREADS, torch.get_num_threads())


def _measured_blocks(
    launch: Launch, loaded: LoadedModel, layout: PageLayout, max_model_len: int, device: torch.device
) -> int:
    """As many blocks as memory allows, with room left for the largest step."""
    if device.type == "cpu":
        return choose_blocks(launch, layout.page_bytes, max_model_len, cpu_bytes(launch.world))
    tokens, rows = launch.max_num_batched_tokens, min(launch.max_num_seqs, launch.max_num_batched_tokens)
    available = cuda_bytes(
        device,
        launch.gpu_memory_utilization,
        layout.largest_layer_bytes,
        lambda: full_step(loaded, device, tokens, rows),
    )
    return choose_blocks(launch, layout.page_bytes, max_model_len, available)


def _row(sequence: Sequence) -> Row:
    return Row(sequence.sampling, sequence.length, sequence.generated < sequence.min_tokens, sequence.history)
