# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: the conformance suite, and multi-head attention as its yardstick."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention, MultiHeadAttention
from jaxkv.attention.grouped_query import default_kv_heads
from jaxkv.core.rotary import Rotary
from jaxkv.testing.conformance import AttentionConformance
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close, assert_trees_equal
from tests.attention.formulas import head_attention, parameters, perturbed

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


class TestConformance(AttentionConformance):
    variant = GroupedQueryAttention


def test_with_as_many_kv_heads_as_heads_it_is_multi_head_attention() -> None:
    grouped = GroupedQueryAttention(16, 4, num_kv_heads=4, rngs=nnx.Rngs(3))
    multi = MultiHeadAttention(16, 4, rngs=nnx.Rngs(3))
    assert_trees_equal(call(grouped, X)[0], call(multi, X)[0])


def test_equals_multi_head_attention_with_repeated_kernels() -> None:
    grouped = perturbed(GroupedQueryAttention(16, 6, head_dim=4, num_kv_heads=2, rngs=nnx.Rngs(0)))
    multi = MultiHeadAttention(16, 6, head_dim=4, rngs=nnx.Rngs(1))
    for name in ("query", "out"):
        getattr(multi, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("key", "value"):
        # Query heads 0, 1, 2 read KV head 0; heads 3, 4, 5 read KV head 1.
        kernel = getattr(grouped, name).kernel[...][:, np.array([0, 0, 0, 1, 1, 1])]
        getattr(multi, name).kernel[...] = kernel
    want, _ = call(multi, X)
    assert_close(call(grouped, X)[0], want)
    assert_close(feed(grouped, X, grouped.init_cache(2, 7), [3, 3])[0], want)


def test_the_default_number_of_kv_heads() -> None:
    for heads in range(1, 65):
        divisors = [k for k in range(1, heads + 1) if heads % k == 0]
        assert default_kv_heads(heads) == max(k for k in divisors if k <= max(2, heads / 4))
    assert GroupedQueryAttention(16, 8, rngs=nnx.Rngs(0)).spec.kv_heads == 2


def test_gqa_03_heads_that_do_not_divide_raise_when_built() -> None:
    for kv_heads in (4, 0, 7, -2):
        with pytest.raises(ValueError, match=f"6 query heads cannot share {kv_heads} KV heads"):
            GroupedQueryAttention(18, 6, num_kv_heads=kv_heads, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gqa_06_one_two_and_four_kv_heads(kv_heads: int) -> None:
    attn = GroupedQueryAttention(
        16, 4, num_kv_heads=kv_heads, rotary=Rotary(50.0), rngs=nnx.Rngs(0)
    )
    attn = perturbed(attn)
    assert attn.key.kernel.shape == attn.value.kernel.shape == (16, kv_heads, 4)
    want, cache = head_attention(parameters(attn), X, 50.0), attn.init_cache(2, 7)
    assert {plane.shape for plane in cache.records.planes.values()} == {(2, kv_heads, 7, 4)}
    assert_close(call(attn, X)[0], want)
    assert_close(feed(attn, X, cache, [3, 3])[0], want)


def test_cac_10_cache_shapes_follow_the_head_width() -> None:
    # 4 heads of 4 channels, whatever the widths of input (8) and output (12).
    for kv_heads in (4, 2):
        attn = GroupedQueryAttention(
            8, 4, head_dim=4, num_kv_heads=kv_heads, out_features=12, rngs=nnx.Rngs(0)
        )
        cache = attn.init_cache(3, 5)
        shapes = {name: plane.shape for name, plane in cache.records.planes.items()}
        assert shapes == {"key": (3, kv_heads, 5, 4), "value": (3, kv_heads, 5, 4)}
        x = jax.ShapeDtypeStruct((3, 2, 8), np.float32)
        y, after = jax.eval_shape(lambda x, c, a=attn: a(x, cache=c), x, cache)
        assert y.shape == (3, 2, 12)
        assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, cache)
