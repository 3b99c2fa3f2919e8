"""Step attention over a shuffled pool against dense attention of each sequence, and the cutting of runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import runs, step_attention
from engine.native.attention import Heads
from engine.native.batch import Decode, build
from engine.native.kernels import Form
from engine.native.pages import LayerShape, PageLayout, PagePool
from engine.native.scheduler import Span
from engine.native.sequence import BLOCK_SIZE, Sequence, blocks_for
from ipc.messages import Sampling
from tests.attention_steps import BACKENDS

HEADS, SHAPES = 4, (LayerShape(2, 8, 8), LayerShape(4, 12, 8), LayerShape(1, 8, 8))

forms = st.builds(
    Form,
    scaling=st.floats(0.1, 0.5),
    window=st.none() | st.integers(1, 400),
    softcap=st.none() | st.floats(0.5, 5),
    sinks=st.none() | st.just(torch.linspace(-1, 1, HEADS)),
)


def dense(heads: Heads, form: Form) -> torch.Tensor:
    """All of one sequence at once, in float64, straight from the definition: [T, H, E]."""
    q, k, v = (x.double().transpose(0, 1) for x in heads)
    k, v = (x.repeat_interleave(HEADS // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * form.scaling
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    places = torch.arange(q.shape[1])
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (form.window or math.inf))
    weights = scores.masked_fill(hidden, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + form.sinks.double().exp()[:, None, None]
    return (weights / total @ v).transpose(0, 1)


def sequence(length: int, table: list[int]) -> Sequence:
    return Sequence(
        slot=0,
        generation=0,
        arrival=0,
        prompt_length=length,
        limit=length,
        min_tokens=0,
        ignore_eos=True,
        sampling=Sampling(seed=0),
        tokens=np.zeros(length, dtype=np.int32),
        table=np.array(table, dtype=np.int32),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", range(len(SHAPES)))
@settings(max_examples=20)
@given(
    splits=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=1, max_size=4),
    form=forms,
    tile=st.sampled_from([32, 512]),
    seed=st.integers(0, 100),
)
def test_chunks_and_decodes_equal_dense_attention(
    *, backend: str, layer: int, splits: list[list[int]], form: Form, tile: int, seed: int
) -> None:
    """Each sequence is computed in pieces of the given sizes; piece i of all of them forms step i."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[layer]
    lengths = [sum(split) for split in splits]
    blocks = iter(torch.randperm(sum(map(blocks_for, lengths)), generator=generator).tolist())
    held = [sequence(length, [next(blocks) for _ in range(blocks_for(length))]) for length in lengths]
    rows = {
        id(one): Heads(
            torch.randn(one.length, HEADS, shape.k_dim, generator=generator),
            torch.randn(one.length, shape.kv_heads, shape.k_dim, generator=generator),
            torch.randn(one.length, shape.kv_heads, shape.v_dim, generator=generator),
        )
        for one in held
    }
    pool = PagePool(PageLayout("x", torch.float32, SHAPES), sum(map(blocks_for, lengths)), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_attention, "QUERY_TILE", tile)
        for step in range(max(map(len, splits))):
            spans = [Span(one, split[step]) for one, split in zip(held, splits, strict=True) if step < len(split)]
            batch = build(spans)
            order = sorted(spans, key=lambda span: (span.tokens > 1, -span.sequence.computed))
            pieces = [rows[id(one)].rows(one.computed, one.computed + count) for one, count in order]
            ours = BACKENDS[backend](pool.layers, batch).attend(
                layer, Heads(*map(torch.cat, zip(*pieces, strict=True))), form
            )
            expected = [dense(rows[id(one)], form)[one.computed : one.computed + count] for one, count in order]
            torch.testing.assert_close(ours.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)
            for one, count in spans:
                one.computed += count


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_place_may_hold_anything_finite(backend: str) -> None:
    """The padding of a block is read: huge leftovers of a former owner must weigh nothing."""
    pool = PagePool(PageLayout("x", torch.float32, SHAPES), 1, torch.device("cpu"))
    pool.layers[0].k.fill_(1e30)
    pool.layers[0].v.fill_(1e30)
    one = sequence(1, [0])
    heads = Heads(torch.ones(1, HEADS, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    out = BACKENDS[backend](pool.layers, build([Span(one, 1)])).attend(0, heads, Form(0.3))
    assert torch.equal(out, torch.ones(1, HEADS, 8))


@given(
    contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 3000),
)
def test_runs_cover_all_rows_with_bounded_padding(contexts: list[int], window: int | None) -> None:
    contexts.sort(reverse=True)
    decodes = [Decode(context, np.arange(blocks_for(context), dtype=np.int32)) for context in contexts]
    cut = runs.cut(decodes, window)
    assert [run.start for run in cut] == [0, *(run.end for run in cut[:-1])]
    assert cut[-1].end == len(contexts)
    for run in cut:
        rows = run.end - run.start
        width = run.blocks.size // rows
        seen = [min(context, window or context) for context in contexts[run.start : run.end]]
        assert (run.mask == 0).sum(axis=1).tolist() == seen
        assert run.mask.shape[0] == rows
        assert (width - 1) * BLOCK_SIZE < run.mask.shape[1] <= width * BLOCK_SIZE
        assert (run.mask[:, -1] == 0).any()
        # A window that starts within a block touches one block more than its length fills.
        assert width <= runs.MAX_PADDING * (blocks_for(min(seen)) + 1)
        assert rows == 1 or rows * width * BLOCK_SIZE <= runs.MAX_GATHERED_TOKENS
        for row, context in zip(run.blocks.reshape(rows, width), contexts[run.start : run.end], strict=True):
            assert row.max() == blocks_for(context) - 1
            assert row[0] == runs.first_block(context, window)
