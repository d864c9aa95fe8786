# SPDX-License-Identifier: Apache-2.0
"""Projections are as wide as the heads they make."""

import jax
import pytest
from flax import nnx

import jaxkv


@pytest.mark.parametrize(("kv_heads", "columns"), [(1, 40), (2, 48), (8, 96)])
def test_gqa_05_projections_follow_the_kv_heads(kv_heads: int, columns: int) -> None:
    attn = jaxkv.GroupedQueryAttention(32, 8, num_kv_heads=kv_heads, head_dim=4, rngs=nnx.Rngs(0))
    parts = (attn.query, attn.key, attn.value)
    weights = sum(x.size for part in parts for x in jax.tree.leaves(nnx.state(part)))
    # (8 query heads + 2 x K KV heads) x 4 channels, of 32 features.
    assert weights == 32 * columns
