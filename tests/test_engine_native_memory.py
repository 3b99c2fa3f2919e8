"""How many blocks a rank takes when nobody says it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from engine.native import memory
from engine.native.engine import NativeEngine
from engine.native.errors import LaunchError
from engine.native.pages import LayerShape, PageLayout, PagePool
from hicache.memory import Room
from tests import tiny_models
from tests.native_requests import launch


def test_blocks_are_what_memory_allows_and_no_more_than_all_sequences_need(tmp_path: Path) -> None:
    one = launch(tmp_path, max_num_seqs=4)
    assert memory.choose_blocks(one, page_bytes=1000, max_model_len=300, available=5999) == 5
    assert memory.choose_blocks(one, page_bytes=1000, max_model_len=300, available=10**9) == 4 * 3


def test_too_little_memory_shows_the_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"999 bytes for the pool, 1000 bytes a block.*set num_kv_blocks"):
        memory.choose_blocks(launch(tmp_path), page_bytes=1000, max_model_len=300, available=999)


def test_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "room", lambda: Room(300_000_000, "MemAvailable"))
    assert memory.cpu_bytes(1) == int(300_000_000 * memory.CPU_SHARE)
    assert memory.cpu_bytes(2) == int(300_000_000 * memory.CPU_SHARE) // 2


def test_a_pool_commits_memory_only_when_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    layout = PageLayout("x", torch.float32, (LayerShape(8, 64, 64),))
    pool = PagePool(layout, (1 << 30) // layout.page_bytes, torch.device("cpu"))
    assert resident() - before < 1 << 28
    pool.bytes[: len(pool.bytes) // 2] = 1
    assert resident() - before > 1 << 28


def test_an_engine_sizes_itself(tmp_path: Path) -> None:
    folder = tiny_models.write("llama", tmp_path)
    facts = NativeEngine(launch(folder, num_kv_blocks=0, max_num_seqs=3)).facts
    assert facts.num_blocks == 3 * tiny_models.CONTEXT // facts.block_size


def test_more_blocks_than_memory_are_refused_with_the_arithmetic() -> None:
    memory.check_blocks(10, page_bytes=1000)
    with pytest.raises(LaunchError, match=r"--num-kv-blocks 2000000000: 2,000,000,000 x 1,000,000 bytes = 2,000,000,0"):
        memory.check_blocks(2_000_000_000, page_bytes=1_000_000)
