"""The native kernels against their torch twin, what they must not depend on, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import _kernels
from engine.native.attention import Heads
from engine.native.cpu_attention import CpuAttention, CpuPages
from engine.native.kernels import Form
from engine.native.pages import LayerPages, LayerShape
from engine.native.step_attention import StepAttention
from tests.attention_steps import KERNEL, Spans, batch_of, heads_of, last_block, pool_blocks, pool_of

SHAPE = LayerShape(2, 16, 16)
MIXED: Spans = [(1, 300), (1, 1), (1, 2000), (3, 129), (200, 500), (130, 130)]


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- against the twin ----


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, LayerShape, Form]:
    """Query heads, shape and form of a layer."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7, 16]))
    dims = st.sampled_from([1, 7, 8, 16, 24, 33, 64, 80, 128])
    heads = kv_heads * group
    form = Form(
        scaling=draw(st.floats(0.05, 0.5)),
        window=draw(st.none() | st.sampled_from([1, 2, 127, 128, 129, 500])),
        softcap=draw(st.none() | st.floats(0.5, 20)),
        sinks=draw(st.none() | st.just(torch.linspace(-3, 5, heads))),
    )
    return heads, LayerShape(kv_heads, draw(dims), draw(dims)), form


contexts = st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 400])
decode_spans = st.lists(contexts | st.just(4500), max_size=4).map(lambda some: [(1, context) for context in some])
chunk_spans = st.lists(st.tuples(st.integers(2, 300), contexts), max_size=2).map(
    lambda some: [(count, count + past - 1) for count, past in some]
)


@pytest.mark.parametrize("level", range(len(_kernels.LEVELS)), ids=_kernels.LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)  # also run under sanitizers, without conftest.py
@given(
    spans=st.tuples(decode_spans, chunk_spans).map(lambda both: both[0] + both[1]).filter(bool),
    layer=layers(),
    seed=st.integers(0, 100),
)
def test_a_step_equals_the_torch_twins(
    dtype: torch.dtype, level: int, spans: list[tuple[int, int]], layer: tuple[int, LayerShape, Form], seed: int
) -> None:
    """The twin computes in float32 on the same numbers, so that only the rounding of the result is left to bfloat16."""
    heads, shape, form = layer
    batch = batch_of(spans, seed)
    given_heads = heads_of(len(batch.ids), heads, shape, dtype, seed)
    pool = pool_of(shape, pool_blocks(spans), dtype, seed)
    twin = pool_of(shape, pool_blocks(spans), torch.float32, seed)
    for ours, theirs in zip(pool.layers, twin.layers, strict=True):
        theirs.k.copy_(ours.k)
        theirs.v.copy_(ours.v)
    out = CpuAttention(CpuPages(KERNEL, pool.layers, level=level), batch).attend(0, given_heads, form)
    expected = StepAttention(twin.layers, batch).attend(0, Heads(*(x.float() for x in given_heads)), form)
    rounding = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(out.float(), expected, rtol=rounding, atol=2e-5)
    assert torch.equal(pool.layers[0].k.float(), twin.layers[0].k)
    assert torch.equal(pool.layers[0].v.float(), twin.layers[0].v)


def attend(spans: Spans, dtype: torch.dtype = torch.float32, **how: Any) -> torch.Tensor:
    batch, pool = batch_of(spans), pool_of(SHAPE, pool_blocks(spans), dtype)
    heads = heads_of(len(batch.ids), 6, SHAPE, dtype)
    return CpuAttention(CpuPages(KERNEL, pool.layers, **how), batch).attend(0, heads, Form(0.25))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    alone = attend(MIXED, dtype)
    for count in (2, 5):
        torch.set_num_threads(count)
        for use_openmp in (True, False):
            assert torch.equal(attend(MIXED, dtype, use_openmp=use_openmp), alone)


def test_results_are_the_same_bits_beside_any_neighbours() -> None:
    batch, pool = batch_of(MIXED), pool_of(SHAPE, pool_blocks(MIXED), torch.float32)
    heads, form = heads_of(len(batch.ids), 6, SHAPE, torch.float32), Form(0.25, window=300)
    together = CpuAttention(CpuPages(KERNEL, pool.layers), batch).attend(0, heads, form)
    for span, (count, context) in enumerate(MIXED):
        one = batch_of([(count, context)])
        one.tables[:] = batch.tables[batch.table_starts[span] : batch.table_starts[span + 1]]
        start, end = batch.starts[span], batch.starts[span + 1]
        alone = CpuAttention(CpuPages(KERNEL, pool.layers), one).attend(0, heads.rows(start, end), form)
        assert torch.equal(alone, together[start:end])


# ---- what lies in memory ----


@pytest.mark.parametrize("leftover", [float("nan"), float("inf"), 3e38])
def test_what_lies_behind_the_context_is_not_read(leftover: float) -> None:
    """Stronger than the twin, which needs finite leftovers: nothing behind the last token takes part."""
    expected = attend(MIXED)
    batch, pool = batch_of(MIXED), pool_of(SHAPE, pool_blocks(MIXED), torch.float32)
    for span in range(len(MIXED)):
        block, place = last_block(batch, span)
        pool.layers[0].k[block, place:] = leftover
        pool.layers[0].v[block, place:] = leftover
    heads = heads_of(len(batch.ids), 6, SHAPE, torch.float32)
    assert torch.equal(CpuAttention(CpuPages(KERNEL, pool.layers), batch).attend(0, heads, Form(0.25)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_projection_breaks_the_result(dtype: torch.dtype, which: str, value: float) -> None:
    """The engine ends a request whose logits are not finite; a kernel that hid it would serve garbage."""
    batch, pool = batch_of([(1, 200)]), pool_of(SHAPE, 4, dtype)
    heads = heads_of(1, 6, SHAPE, dtype)
    getattr(heads, which)[:] = value
    out = CpuAttention(CpuPages(KERNEL, pool.layers), batch).attend(0, heads, Form(0.25))
    assert not torch.isfinite(out).any()


@pytest.mark.parametrize("level", range(len(_kernels.LEVELS)), ids=_kernels.LEVELS)
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00001, 0x7FC001FF, 0x7FFFFFFF, -1])
def test_no_bits_of_a_nan_make_it_a_number(bits: int, which: str, level: int) -> None:
    """Memory that was never written, or a checkpoint's rubbish, has any: exponentials that add bits could carry."""
    batch, pool = batch_of([(1, 200)]), pool_of(SHAPE, 4, torch.float32)
    heads = heads_of(1, 6, SHAPE, torch.float32)
    getattr(heads, which).view(torch.int32)[:] = bits
    out = CpuAttention(CpuPages(KERNEL, pool.layers, level=level), batch).attend(0, heads, Form(0.25))
    assert not torch.isfinite(out).any()


def test_projections_of_any_layout_are_taken() -> None:
    batch, pool = batch_of([(5, 5)]), pool_of(SHAPE, 3, torch.float32)
    heads = heads_of(5, 6, SHAPE, torch.float32)
    odd = Heads(*(x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in heads))
    assert odd.q.stride(2) != 1
    step = CpuAttention(CpuPages(KERNEL, pool.layers), batch)
    assert torch.equal(step.attend(0, odd, Form(0.25)), step.attend(0, heads, Form(0.25)))


# ---- refusals ----


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("tables", 1, 99, "span 0: block 99 is not one of 9"),
        ("tables", 4, -1, "span 1: block -1 is not one of 9"),
        ("contexts", 0, 500, "span 0: its table is shorter than its context"),
        ("contexts", 1, 1, "span 1: its context is shorter than itself"),
        ("contexts", 1, 2**62, "span 1: its table is shorter than its context"),
        ("starts", 0, 1, "spans and tables must start at 0"),
        ("starts", 1, 0, "span 0: its rows are not within the 4"),
        ("starts", 2, 5, "span 1: its rows are not within the 4"),
        ("starts", 2, 3, "the spans do not cover all rows"),
        ("table_starts", 1, 99, "span 0: its table is not within the tables"),
        ("table_starts", 2, 99, "span 1: its table is not within the tables"),
        ("table_starts", 0, -1, "spans and tables must start at 0"),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_any_access(field: str, place: int, value: int, message: str) -> None:
    spans: Spans = [(1, 300), (3, 400)]
    batch, pool = batch_of(spans), pool_of(SHAPE, pool_blocks(spans), torch.float32)
    before = pool.bytes.clone()
    getattr(batch, field)[place] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        CpuAttention(CpuPages(KERNEL, pool.layers), batch).attend(0, heads_of(4, 6, SHAPE, torch.float32), Form(0.25))
    assert torch.equal(pool.bytes, before)


def test_tensors_that_do_not_fit_the_pages_are_refused() -> None:
    batch, pool = batch_of([(4, 4)]), pool_of(SHAPE, 3, torch.float32)
    heads, pages = heads_of(4, 6, SHAPE, torch.float32), pool.layers[0]

    plain = Form(0.25)

    def refused(message: str, heads: Heads = heads, pages: LayerPages = pages, form: Form = plain) -> None:
        with pytest.raises(ValueError, match=message):
            CpuAttention(CpuPages(KERNEL, (pages,)), batch).attend(0, heads, form)

    refused("^q: ", heads._replace(q=heads.q[:, :, :8]))
    refused("^k: ", heads._replace(k=heads.k[:3]))
    refused("^k: ", heads._replace(k=heads.k.double()))
    refused("^v: ", heads._replace(v=heads.v[:, :1]))
    refused("^v: .* on meta", heads._replace(v=heads.v.to("meta")))
    refused("5 heads are no multiple of 2", heads._replace(q=heads.q[:, :5]))
    refused("spans do not cover|not within", Heads(*(x[:3] for x in heads)))
    refused("pages of torch.float16", pages=LayerPages(pages.k.half(), pages.v.half()))
    refused("pages of v: .*float64", pages=LayerPages(pages.k, pages.v.double()))
    refused("pages of v: ", pages=LayerPages(pages.k, pages.v[:2]))
    refused("block must be dense", pages=LayerPages(pages.k.transpose(1, 2).contiguous().transpose(1, 2), pages.v))
    refused("blocks must not overlap", pages=LayerPages(pages.k[:1].expand(3, -1, -1, -1), pages.v))
    refused("sinks", form=Form(0.25, sinks=torch.zeros(5)))
    refused("window is -3", form=Form(0.25, window=-3))


def test_calls_that_only_a_wrong_wrapper_could_make_are_refused() -> None:
    batch, pages = batch_of([(1, 1)]), pool_of(SHAPE, 3, torch.float32).layers[0]
    tables: list[Any] = [batch.starts, batch.contexts, batch.table_starts, batch.tables]

    def refused(message: str, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "element": "float32",
            "rows": [(pages.k.data_ptr(), 32, 16)] * 3,
            "out": pages.k.data_ptr(),
            "pages": [(pages.k.data_ptr(), pages.k.stride(0))] * 2,
            "shape": (1, 2, 2, 16, 16, 3),
            "tables": tuple(tables),
            "level": 0,
            "threads": 1,
            **changes,
        }
        element, rows, out, paged, shape, given_tables, level, threads = arguments.values()
        with pytest.raises(ValueError, match=message):
            KERNEL.attend(element, *rows, out, *paged, shape, given_tables, 1.0, 0, 0.0, 0, level, threads, True)

    refused("element type int8", element="int8")
    refused("level 9", level=9)
    refused("level -1", level=-1)
    refused("threads is 0", threads=0)
    refused("heads and head sizes", shape=(1, 2, 0, 16, 16, 3))
    refused("heads and head sizes", shape=(1, 2, 2, 1 << 40, 16, 3))
    refused("starts must be one dimension of 8-byte", tables=(batch.starts.astype(np.int32), *tables[1:]))
    refused("blocks must be one dimension of 4-byte", tables=(*tables[:3], batch.tables[None]))
    refused("one entry more", tables=(batch.starts[:1], *tables[1:]))
