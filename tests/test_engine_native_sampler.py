"""The sampler against a naive one, and its promise: a draw depends on seed, position and the row's logits alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native.adjust import Row, adjust, needs_history
from engine.native.draw import NUCLEUS_CANDIDATES, Knobs, draw, uniform
from engine.native.history import TokenHistory
from engine.native.sampler import Sampler, Samples
from ipc.messages import Sampling
from tests import naive_sampling

VOCABULARY = 50
EOS = (2, 7)

ids = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.just(0.0) | st.floats(0.1, 3),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    top_k=st.just(0) | st.integers(1, 2 * VOCABULARY),
    min_p=st.just(0.0) | st.floats(0.001, 1),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    logprobs=st.integers(-1, 5),
)


@st.composite
def requests(draw_from: st.DrawFn) -> tuple[Row, list[int], list[int]]:
    """A row with the prompt and output that its history has seen."""
    sampling = draw_from(samplings)
    prompt = draw_from(st.lists(ids, min_size=1, max_size=10))
    output = draw_from(st.lists(ids, max_size=10))
    history = None
    if needs_history(sampling):
        history = TokenHistory(VOCABULARY, np.array(prompt, dtype=np.int32))
        for token in output:
            history.append(token)
    return Row(sampling, len(prompt) + len(output), draw_from(st.booleans()), history), prompt, output


batches = st.lists(requests(), min_size=1, max_size=6)


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, rows: list[Row]) -> Samples:
    return Sampler(EOS).sample(logits.clone(), rows)


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(0, 1000))
def test_adjustments_equal_the_naive_ones(batch: list[tuple[Row, list[int], list[int]]], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    ours = logits.clone()
    adjust(ours, [row for row, _, _ in batch], EOS)
    for (row, prompt, output), before, after in zip(batch, logits, ours, strict=True):
        expected = naive_sampling.adjusted(
            before.double().numpy(),
            row.sampling,
            prompt=prompt,
            output=output,
            banned=EOS if row.banned else (),
        )
        np.testing.assert_allclose(after.numpy(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=200, deadline=None)
@given(samplings, st.integers(0, 1000))
def test_draws_are_the_inverse_of_the_naive_distribution(sampling: Sampling, seed: int) -> None:
    """Walking through the unit interval gives each id in order, in proportion to its naive probability."""
    temperature = sampling.temperature or 1.0
    logits = random_logits(1, seed)
    changed = Sampling(
        seed=0, temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    expected = np.cumsum(naive_sampling.distribution(logits[0].double().numpy(), changed))
    numbers = (np.arange(400) + 0.5) / 400
    drawn = draw(logits.expand(400, -1), knobs([changed] * 400), numbers).numpy()
    below = np.where(drawn > 0, expected[drawn - 1], 0.0)
    rounding = 1e-5
    assert (numbers >= below - rounding).all()
    assert (numbers <= expected[drawn] + rounding).all()


def knobs(samplings_of_rows: list[Sampling]) -> Knobs:
    return Knobs(
        temperature=np.array([one.temperature for one in samplings_of_rows], dtype=np.float32),
        top_k=np.array([one.top_k for one in samplings_of_rows]),
        top_p=np.array([one.top_p for one in samplings_of_rows]),
        min_p=np.array([one.min_p for one in samplings_of_rows]),
    )


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_batch(batch: list[tuple[Row, list[int], list[int]]], seed: int) -> None:
    rows = [row for row, _, _ in batch]
    logits = random_logits(len(rows), seed)
    together = sample(logits, rows)
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = sample(logits[torch.from_numpy(order)], [rows[index] for index in order])
    assert shuffled.tokens.tolist() == together.tokens[order].tolist()
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row])
        assert alone.tokens[0] == together.tokens[index]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[index], abs=1e-5)
        assert alone.tops.get(0) == together.tops.get(index)


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(0, 1000))
def test_logprobs_are_of_the_models_own_distribution(batch: list[tuple[Row, list[int], list[int]]], seed: int) -> None:
    rows = [row for row, _, _ in batch]
    logits = random_logits(len(rows), seed)
    samples = sample(logits, rows)
    own = torch.log_softmax(logits.double(), dim=-1).numpy()
    for index, row in enumerate(rows):
        wanted = row.sampling.logprobs
        expected = own[index, samples.tokens[index]] if wanted >= 0 else 0
        assert samples.logprobs[index] == pytest.approx(expected, abs=1e-5)
        assert (index in samples.tops) == (wanted > 0)
        if wanted > 0:
            best = np.argsort(-own[index], kind="stable")[:wanted]
            assert samples.tops[index].ids == tuple(best)
            np.testing.assert_allclose(samples.tops[index].logprobs, own[index, best], atol=1e-5)


def test_greedy_rows_take_the_best_id_beside_drawn_ones() -> None:
    logits = random_logits(3, 0)
    rows = [Row(Sampling(seed=1, temperature=t), 5, banned=False, history=None) for t in (0.0, 5.0, 0.0)]
    tokens = sample(logits, rows).tokens
    best = logits.argmax(-1)
    assert tokens[0] == best[0]
    assert tokens[2] == best[2]


def test_banned_ends_are_never_chosen() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, EOS] = 100
    rows = [Row(Sampling(seed=1, temperature=t, logit_bias={2: 100}), 5, banned=True, history=None) for t in (0, 1)]
    assert not set(sample(logits, rows).tokens.tolist()) & set(EOS)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_is_told_and_leaves_the_others_alone(broken: float) -> None:
    logits = random_logits(3, 0)
    healthy = logits.clone()
    logits[1, 5] = broken
    rows = [Row(Sampling(seed=1, temperature=t, top_p=0.9), 5, banned=False, history=None) for t in (0, 1, 1)]
    samples = sample(logits, rows)
    assert samples.finite.tolist() == [True, False, True]
    assert samples.tokens[[0, 2]].tolist() == sample(healthy, rows).tokens[[0, 2]].tolist()
    assert 0 <= samples.tokens[1] < VOCABULARY


def test_a_nucleus_larger_than_the_candidates_is_found() -> None:
    """A flat distribution: half of its mass is half of its ids, far more than the candidates of the short way."""
    size = 4 * NUCLEUS_CANDIDATES
    logits = random_logits(1, 3, size) * 1e-3
    sampling = Sampling(seed=0, top_p=0.5)
    expected = naive_sampling.distribution(logits[0].double().numpy(), sampling) > 0
    ranks = logits[0].argsort(descending=True).argsort().numpy()
    numbers = (np.arange(500) + 0.5) / 500
    drawn = draw(logits.expand(500, -1), knobs([sampling] * 500), numbers).numpy()
    assert expected[drawn].mean() > 0.999  # one id at the edge may fall on either side by rounding
    assert ranks[drawn].max() > 0.95 * expected.sum() > NUCLEUS_CANDIDATES


def test_frequencies_follow_the_probabilities() -> None:
    """20,000 positions of one seed over five ids: each within four standard deviations."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 20_000
    logits = torch.from_numpy(np.log(probabilities)).float().expand(count, -1)
    numbers = uniform(np.full(count, 12345, dtype=np.uint64), np.arange(count, dtype=np.uint64))
    drawn = draw(logits, knobs([Sampling(seed=0)] * count), numbers).numpy()
    found = np.bincount(drawn, minlength=5)
    deviation = np.sqrt(count * probabilities * (1 - probabilities))
    assert (np.abs(found - count * probabilities) < 4 * deviation).all()


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    numbers = uniform(seeds, positions)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    for shifted in (numbers[1:, :-1], numbers[:-1, 1:], numbers[1:, 1:]):
        assert abs(np.corrcoef(numbers[:-1, :-1].ravel(), shifted.ravel())[0, 1]) < 0.02
    # A seed that is one Weyl step on must not be the same stream one position on.
    step = np.uint64(0x9E3779B97F4A7C15)
    stream = np.arange(200, dtype=np.uint64)
    assert not np.isin(uniform(np.full(200, step), stream), uniform(np.full(200, 0, np.uint64), stream)).any()
