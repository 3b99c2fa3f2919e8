"""How many blocks the pool gets: the number asked for, or what memory allows.

Promises an error that shows the arithmetic where not even one block fits. Knows nothing about what a block holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.native.errors import LaunchError
from engine.native.runs import MAX_GATHERED_TOKENS
from engine.native.sequence import BLOCK_SIZE, blocks_for
from engine.native.step_attention import MAX_TILE_ELEMENTS
from hicache.memory import room
from ipc.messages import Launch

# Of the memory that is available at start, for the pools of all ranks of the machine. The rest is for activations,
# the host cache and the server; pool memory is committed only when a block is first used.
CPU_SHARE = 0.3

# Copies that the explicit kernel makes of one tile: scores, weights and their softcap, in float32.
TILE_COPIES = 4


def choose_blocks(launch: Launch, page_bytes: int, max_model_len: int, available: int) -> int:
    """Blocks of a rank's pool out of `available` bytes, never more than all its sequences at full length need."""
    most = launch.max_num_seqs * blocks_for(max_model_len)
    blocks = min(most, available // page_bytes)
    if blocks < 1:
        raise LaunchError(
            f"num_kv_blocks: no room for a single block: {available} bytes for the pool, {page_bytes} bytes a block "
            f"of {BLOCK_SIZE} tokens; set num_kv_blocks or free memory"
        )
    return blocks


def check_blocks(blocks: int, page_bytes: int) -> None:
    """Refuse a number of blocks that this machine's memory cannot hold. Raises LaunchError."""
    now, size = room(), blocks * page_bytes
    if size > now.available:
        raise LaunchError(
            f"--num-kv-blocks {blocks}: {blocks:,} x {page_bytes:,} bytes = {size:,} bytes, but there are "
            f"{now.available:,} bytes ({now.source}), enough for {now.available // page_bytes:,}"
        )


def cpu_bytes(world: int) -> int:
    """Bytes for one rank's pool in host memory."""
    return int(room().available * CPU_SHARE) // world


def cuda_bytes(device: torch.device, share: float, layer_bytes: int, full_step: Callable[[], object]) -> int:
    """Bytes for the pool on a card: `share` of it, less what is in use, what a full step takes at its peak, and the
    largest gather of one layer (`layer_bytes` a token) with its tile. Runs `full_step` once to measure."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    full_step()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    gather = MAX_GATHERED_TOKENS * layer_bytes + MAX_TILE_ELEMENTS * torch.float32.itemsize * TILE_COPIES
    return max(0, int(total * share) - (total - free) - peak - gather)
