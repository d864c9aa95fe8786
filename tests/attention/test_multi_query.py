# SPDX-License-Identifier: Apache-2.0
"""Multi-query attention: the conformance suite, and the one key that all heads share."""

from __future__ import annotations

import numpy as np
from flax import nnx

from jaxkv.attention import GroupedQueryAttention, MultiQueryAttention
from jaxkv.testing.conformance import AttentionConformance
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close, assert_trees_equal
from tests.attention.formulas import LIKE_GROUPED_QUERY, parameters, perturbed

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


class TestConformance(AttentionConformance):
    in_full = LIKE_GROUPED_QUERY
    variant = MultiQueryAttention


def test_equals_the_formula_of_shazeer() -> None:
    # arXiv:1911.02150, section 3.1: logits "bhnk,bmk->bhnm", outputs "bhnm,bmv->bhnv".
    attn = perturbed(MultiQueryAttention(16, 4, head_dim=6, value_dim=5, rngs=nnx.Rngs(0)))
    p, x = parameters(attn), X.astype(np.float64)
    query = np.einsum("btd,dnh->bnth", x, p["query"]["kernel"])
    key, value = (np.einsum("bsd,dkh->bsh", x, p[name]["kernel"]) for name in ("key", "value"))
    logits = np.einsum("bnth,bsh->bnts", query, key) / np.sqrt(6)
    logits = np.where(np.tril(np.ones((6, 6), bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bnts,bsv->btnv", weights, value)
    want = np.einsum("btnv,nvd->btd", out, p["out"]["kernel"])
    assert_close(call(attn, X)[0], want)
    assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want)


def test_is_grouped_query_attention_with_one_kv_head() -> None:
    ours = MultiQueryAttention(16, 4, rngs=nnx.Rngs(3))
    grouped = GroupedQueryAttention(16, 4, num_kv_heads=1, rngs=nnx.Rngs(3))
    assert ours.spec == grouped.spec
    assert_trees_equal(call(ours, X)[0], call(grouped, X)[0])


def test_the_cache_is_as_many_times_smaller_as_there_are_heads() -> None:
    cache = MultiQueryAttention(16, 4, rngs=nnx.Rngs(0)).init_cache(2, 7)
    shapes = {name: plane.shape for name, plane in cache.records.planes.items()}
    assert shapes == {"key": (2, 1, 7, 4), "value": (2, 1, 7, 4)}
