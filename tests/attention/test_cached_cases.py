# SPDX-License-Identifier: Apache-2.0
"""Faults seen elsewhere that need a module and its cache together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention, MultiHeadLatentAttention
from jaxkv.cache import Layout, Paged, Ring
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close, assert_trees_equal
from tests.ops.suite import IMPLEMENTATIONS

X = np.random.default_rng(0).normal(size=(2, 11, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        (GroupedQueryAttention, None),
        (GroupedQueryAttention, Ring(3)),
        (MultiHeadLatentAttention, Paged(4)),
        pytest.param(GroupedQueryAttention, Paged(4), marks=pytest.mark.full),
        pytest.param(MultiHeadLatentAttention, None, marks=pytest.mark.full),
        pytest.param(MultiHeadLatentAttention, Ring(3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_win_08_a_chunk_equals_one_prefill(variant: type, layout: Layout | None) -> None:
    attn = variant(16, 4, window=3, rotary=Rotary(50.0), rngs=nnx.Rngs(0))
    want, _ = feed(attn, X[:, :10], attn.init_cache(2, 12, layout=layout), [10])
    assert_close(want, call(attn, X[:, :10])[0])
    got, _ = feed(attn, X[:, :10], attn.init_cache(2, 12, layout=layout), [6, 4])
    assert_close(got, want)


@pytest.mark.parametrize("variant", [GroupedQueryAttention, MultiHeadLatentAttention])
def test_win_10_a_one_token_step_keeps_the_window(variant: type) -> None:
    attn = variant(16, 4, window=3, rotary=Rotary(50.0), rngs=nnx.Rngs(0))
    want, _ = call(attn, X)
    other = X.copy()
    other[:, 0] += 1.0
    steps = []
    for x in (X, other):
        _, cache = feed(attn, x[:, :10], attn.init_cache(2, 12), [10])
        steps.append(call(attn, x[:, 10:], cache)[0])
    assert_trees_equal(*steps)
    assert_close(steps[0], want[:, 10:])


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (GroupedQueryAttention, ["einsum", "blockwise"]),
        pytest.param(GroupedQueryAttention, list(IMPLEMENTATIONS), marks=pytest.mark.full),
        pytest.param(MultiHeadLatentAttention, list(IMPLEMENTATIONS), marks=pytest.mark.full),
    ],
    ids=["grouped query, two", "grouped query, all", "latent, all"],
)
def test_chk_07_every_implementation_agrees_with_and_without_a_cache(
    variant: type, names: list[str]
) -> None:
    found = {}
    for name in names:
        numerics = Numerics(implementation=IMPLEMENTATIONS[name])
        attn = variant(16, 4, rotary=Rotary(50.0), numerics=numerics, rngs=nnx.Rngs(0))
        found[name, "no cache"], _ = call(attn, X)
        found[name, "prefill"], _ = feed(attn, X, attn.init_cache(2, 12), [11])
        found[name, "steps"], _ = feed(attn, X, attn.init_cache(2, 12), [1] * 11)
    assert len(found) == 3 * len(names) >= 6
    for (one, got), (two, want) in itertools.combinations(found.items(), 2):
        assert_close(got, want, what=f"{one} and {two}")


@pytest.mark.parametrize("variant", [GroupedQueryAttention, MultiHeadLatentAttention])
def test_scores_of_any_size_stay_finite(variant: type) -> None:
    # Products of this size differ by more than exp can take when they are computed twice.
    attn, x = variant(16, 4, rngs=nnx.Rngs(0)), 1e5 * X[:, :6]
    want, _ = call(attn, x)
    got, cache = feed(attn, x, attn.init_cache(2, 8), [5, 1])
    assert np.isfinite(want).all() and np.isfinite(got).all()
    # A softmax of such scores takes one value, and rounding may decide which.
    assert np.abs(got).max() <= 1.01 * np.abs(want).max()
    assert cache.lengths.tolist() == [6, 6]


def test_row_04_local_blocks_are_counted_from_the_first_real_token() -> None:
    # Blocks of 4 tokens; the second row of 6 begins with 2 of padding.
    attn = GroupedQueryAttention(16, 4, rotary=Rotary(50.0), rngs=nnx.Rngs(0))
    x, segments = X[:, :6], np.array([[1] * 6, [0, 0, 1, 1, 1, 1]], np.int32)
    order = np.cumsum(segments, axis=1) - 1
    keys = np.arange(6)
    # With a cache, keys are counted by their order in the row, and queries as they are given.
    cached = order[:, None, :, None] // 4 == keys // 4
    plain = order[:, None, :, None] // 4 == order[:, None, None, :] // 4
    got, _ = call(attn, x, attn.init_cache(2, 6), segment_ids=segments, mask=cached)
    uncached, _ = call(attn, x, segment_ids=segments, mask=plain)
    for row, pads in ((0, 0), (1, 2)):
        alone = x[row : row + 1, pads:]
        block = np.arange(6 - pads) // 4
        want, _ = call(attn, alone, mask=block[:, None] == block[None])
        assert_close(got[row, pads:], want[0])
        assert_close(uncached[row, pads:], want[0])
