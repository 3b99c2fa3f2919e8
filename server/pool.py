"""The host pool's start: sized by what the first rank tells, checked against memory, given to every rank.

The descriptors exist before any rank does, so all inherit them; a rank that is started again gets the pool as it is.
Knows nothing about what lies in the pool.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from hicache.memory import Room, memlock_limit, room
from hicache.pool import MAX_SHARE, HostPool, PoolFiles, PoolTooLargeError, preflight
from hicache.shape import PoolShape, auto_bytes, shape_for
from ipc.errors import IpcError, SegmentError
from ipc.link import ServerLink
from ipc.messages import Facts, PoolFds
from server.config import Config, ConfigError
from server.rank import Rank

log = logging.getLogger(__name__)

GIB: Final = 2**30
# Threads that have memory put behind the pool: the kernel clears some GB a second with one of them, and more than
# these find its locks.
PREFAULT_THREADS: Final = 8


class SharedPool:
    """The one pool of a server, from its descriptors to its mapping."""

    def __init__(self, config: Config) -> None:
        """Make the descriptors. Raises ConfigError for a size that cannot fit, and SegmentError."""
        _check_size(config, room())
        self.on_open: Callable[[PoolShape, Facts], None] = lambda shape, facts: None
        self.on_fatal: Callable[[str], None] = lambda why: None
        self._config = config
        self._files = PoolFiles.create()
        self._facts: Facts | None = None
        self.host: HostPool | None = None  # once it has its size
        self._waiting: list[tuple[Rank, ServerLink]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def fds(self) -> PoolFds:
        """What every rank inherits."""
        return self._files.fds

    def rank_loaded(self, rank: Rank, facts: Facts) -> None:
        """A rank has its model and waits for the pool; the first one decides its shape."""
        assert rank.link is not None  # it has just told us through it
        if self._facts is None:
            self._facts = facts
            self._task = asyncio.get_running_loop().create_task(self._make(facts))
        elif difference := _difference(self._facts, facts):
            self.on_fatal(f"engine rank {rank.index} cannot share the prefix cache with the others: {difference}")
            return
        self._waiting.append((rank, rank.link))
        self._attach()

    def close(self) -> None:
        """Close the descriptors; the memory goes when the last process that maps it has ended."""
        if self._task is not None:
            self._task.cancel()
        self._files.close()

    async def _make(self, facts: Facts) -> None:
        try:
            # Off the loop: it reads files, and has the kernel clear perhaps hundreds of GB.
            self.host = await asyncio.to_thread(self._sized, facts)
            self.on_open(self.host.shape, facts)
            self._attach()
        except (PoolTooLargeError, SegmentError, OSError) as error:
            self.on_fatal(f"the prefix cache cannot be made: {error}")
        except Exception as error:  # the border of this task: the ranks would wait for ever
            log.exception("the prefix cache cannot be made")
            self.on_fatal(f"the prefix cache cannot be made: {error!r}")

    def _sized(self, facts: Facts) -> HostPool:
        config, ranks, now = self._config, self._config.dp, room()
        if config.hicache_size_gb is None:
            size = auto_bytes(now.available, ranks, facts.page_bytes) or facts.page_bytes
        else:
            size = int(config.hicache_size_gb * GIB)
        shape = shape_for(size, ranks, facts.page_bytes, config.hicache_state_slots, facts.state_bytes)
        on_device = facts.device.startswith("cuda")
        promised = 0 if on_device else ranks * facts.num_blocks * facts.page_bytes
        preflight(shape, ranks, room=now, promised=promised, pinned=on_device, memlock=memlock_limit())
        pool = self._files.size(shape)
        pool.prefault(min(PREFAULT_THREADS, os.cpu_count() or 1))
        log.info(
            "prefix cache of %d rank(s): %d pages of %d bytes, %d states of %d bytes, %.3f GiB in all",
            ranks, *shape, shape.size / GIB,
        )  # fmt: skip
        return pool

    def _attach(self) -> None:
        if self.host is None:
            return
        waiting, self._waiting = self._waiting, []
        for rank, link in waiting:
            if rank.link is not link:  # lost while the pool was made
                continue
            try:
                sent = link.send(self.host.shape.message())
            except IpcError as error:  # the supervisor's to find and mend
                log.error("rank %d was not told of the pool: %s", rank.index, error)
                continue
            assert sent, "nothing else was sent to a rank that is not ready"


def _check_size(config: Config, now: Room) -> None:
    """What can be known before a rank is started. Raises ConfigError."""
    if config.hicache_size_gb is None:
        return
    wanted, most = int(config.hicache_size_gb * config.dp * GIB), int(now.available * MAX_SHARE)
    if wanted > most:
        raise ConfigError(
            f"--hicache-size-gb {config.hicache_size_gb:g}: {config.dp} rank(s) x {config.hicache_size_gb:g} GiB = "
            f"{wanted:,} bytes, but {MAX_SHARE:.0%} of the {now.available:,} bytes available ({now.source}) are "
            f"{most:,} bytes"
        )


def _difference(first: Facts, other: Facts) -> str:
    """Why pages of one rank would mean something else on the other; empty where they do not."""
    for name in ("page_bytes", "state_bytes", "layout_digest", "keep_tokens", "block_size"):
        if getattr(first, name) != getattr(other, name):
            return f"{name} is {getattr(other, name)!r} instead of {getattr(first, name)!r}"
    return ""
