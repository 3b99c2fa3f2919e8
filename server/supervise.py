"""Keeps the ranks alive: starts their processes, watches heartbeats, and replaces a rank that died or hung.

A rank that goes ends its open requests with an error, nobody else's; it is restarted with fresh rings after a
pause that grows. A rank that cannot load at start, or keeps failing, ends the server through `on_fatal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

import msgspec

from ipc.errors import IpcError
from ipc.heartbeat import Beat, EngineState
from ipc.link import ServerLink
from ipc.messages import Launch, Shutdown
from server.cache import Cache
from server.collect import Collector
from server.config import Config
from server.errors import RankLostError
from server.metrics import Metrics
from server.process import EngineProcess
from server.rank import Rank, RankState

log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.5
# Loading reads the checkpoint, perhaps hundreds of GB from a cold disk, without a sign of life.
LOAD_TIMEOUT_S: Final = 3600.0
# An idle rank beats every second; this much silence is a stopped or stuck process.
IDLE_TIMEOUT_S: Final = 15.0
# The check itself is this late only if the process was stopped or starved: its ranks' silence then proves nothing.
OVERSLEPT_S: Final = 5.0
# Orderly ranks leave within one step; longer ones are killed.
STOP_GRACE_S: Final = 5.0
# Failures in a row, none of them reaching ready, after which restarting is hopeless.
MAX_FAILED_STARTS: Final = 3
RESTART_PAUSE_S: Final = 0.5

_NS: Final = 1e-9


class Supervisor:
    """Owns the processes and links behind a list of ranks."""

    def __init__(
        self,
        config: Config,
        ranks: Sequence[Rank],
        metrics: Metrics,
        cache: Cache,
        *,
        on_fatal: Callable[[str], None],
        on_lost: Callable[[Rank], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._cache = cache
        self._on_fatal = on_fatal
        self._on_lost = on_lost
        self._watched = [_Watched(rank) for rank in ranks]
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start every rank; they become ready on their own time."""
        for watched in self._watched:
            self._spawn(watched)
        self._keep(self._check_forever())

    async def stop(self) -> None:
        """End every rank: ask, wait, kill. Nothing of them is left when this returns."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        for watched in self._watched:
            watched.rank.state = RankState.STOPPED
            if watched.rank.link is not None:
                with contextlib.suppress(IpcError):  # a rank behind a broken link is killed below
                    watched.rank.link.send(Shutdown())
        processes = [watched.process for watched in self._watched if watched.process is not None]
        exits = [asyncio.ensure_future(process.exited.wait()) for process in processes]
        if exits:
            await asyncio.wait(exits, timeout=STOP_GRACE_S)
        for process in processes:
            process.kill()
        await asyncio.gather(*exits)
        for watched in self._watched:
            watched.disconnect()

    def _spawn(self, watched: _Watched) -> None:
        rank, config = watched.rank, self._config
        link = ServerLink.create()
        launch = Launch(
            rank=rank.index,
            world=config.dp,
            engine="native" if config.engine == "auto" else config.engine,
            model=config.model,
            link=link.fds,
            parent_pid=os.getpid(),
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_kv_blocks=config.num_kv_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            log_interval_steps=config.log_interval_steps,
            pool=self._cache.fds,
        )
        rank.state, rank.link = RankState.LOADING, link
        watched.collector = Collector(
            rank, link, self._metrics, self._cache, lambda reason: self._lost(watched, reason)
        )
        watched.collector.start()
        fds = [link.fds.segment, link.fds.to_engine, link.fds.to_server]
        if launch.pool is not None:
            fds += [launch.pool.pages, launch.pool.states]
        watched.started = time.monotonic()
        watched.process = EngineProcess(msgspec.json.encode(launch), fds, lambda how: self._exited(watched, how))
        log.info("rank %d started as process %d", rank.index, watched.process.pid)

    def _exited(self, watched: _Watched, how: str) -> None:
        if watched.collector is not None:
            watched.collector.drain_rest()  # its last words may be in the rings
        self._lost(watched, how)
        # Not before: until it was gone it could still write to the pages that it had been given.
        self._cache.drop_rank(watched.rank.index)

    def _lost(self, watched: _Watched, reason: str) -> None:
        rank = watched.rank
        if self._stopping or rank.state in (RankState.LOST, RankState.STOPPED):
            return
        was_ready = rank.state is RankState.READY
        watched.failed_starts = 0 if was_ready else watched.failed_starts + 1
        message = f"engine rank {rank.index} {'was lost' if rank.facts is not None else 'did not start'} ({reason})"
        open_requests = rank.lose(reason, RankLostError(message))
        watched.disconnect()
        assert watched.process is not None
        watched.process.kill()
        self._metrics.rank_failures.inc()
        if rank.facts is not None:
            log.error("%s; %d open requests ended", message, open_requests)
        self._on_lost(rank)
        if self._hopeless(watched):
            self._on_fatal(message)
        else:
            self._keep(self._restart(watched))

    def _hopeless(self, watched: _Watched) -> bool:
        if self._config.on_rank_failure == "exit":
            return True
        never_ready = watched.rank.facts is None
        return never_ready or watched.failed_starts >= MAX_FAILED_STARTS

    async def _restart(self, watched: _Watched) -> None:
        assert watched.process is not None
        await watched.process.exited.wait()
        await asyncio.sleep(RESTART_PAUSE_S * 2**watched.failed_starts)
        watched.rank.restarts += 1
        try:
            self._spawn(watched)
        except (OSError, IpcError) as error:  # no descriptor, memory or process left, perhaps for a moment only
            watched.disconnect()
            watched.failed_starts += 1
            log.error("rank %d cannot be started again: %s", watched.rank.index, error)
            if self._hopeless(watched):
                self._on_fatal(f"engine rank {watched.rank.index} cannot be started again: {error}")
            else:
                self._keep(self._restart(watched))

    async def _check_forever(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL_S)
            if time.monotonic() - before > CHECK_INTERVAL_S + OVERSLEPT_S:
                # This process stood still, and perhaps the ranks with it, as in a paused container.
                for watched in self._watched:
                    watched.started = time.monotonic()
            for watched in self._watched:
                self._check(watched)

    def _check(self, watched: _Watched) -> None:
        rank = watched.rank
        if rank.link is None:
            return
        try:
            rank.send_late_cancels()
            rank.link.depth()  # the collector would notice a broken ring only when its bell rings
            beat = rank.link.beat()
        except IpcError as error:
            self._lost(watched, f"its link is broken: {error}")
            return
        silence = time.monotonic() - max(beat.time_ns * _NS, watched.started)
        limit = self._limit(beat)
        if silence > limit:
            self._lost(watched, f"hung: no sign of life for {silence:.0f} s in state {beat.state.name}")

    def _limit(self, beat: Beat) -> float:
        """How long silence is no reason to worry, by what the rank last said it does."""
        match beat.state:
            case EngineState.LOADING:
                return LOAD_TIMEOUT_S
            case EngineState.IDLE:
                return min(IDLE_TIMEOUT_S, self._config.step_timeout)
            case _:
                return self._config.step_timeout

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Watched:
    """A rank with what keeps it alive."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.process: EngineProcess | None = None
        self.collector: Collector | None = None
        self.failed_starts = 0
        self.started = 0.0

    def disconnect(self) -> None:
        """Stop reading and unmap; the process may still be dying."""
        if self.collector is not None:
            self.collector.stop()
            self.collector = None
        if self.rank.link is not None:
            self.rank.link.close()
            self.rank.link = None
