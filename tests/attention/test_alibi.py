# SPDX-License-Identifier: Apache-2.0
"""ALiBi in modules and caches, held against the paper's formula."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import (
    GroupedQueryAttention,
    LatentOptions,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    ScoreOptions,
)
from jaxkv.cache import (
    H2O,
    Codec,
    Contiguous,
    Evicting,
    Int8,
    Kivi,
    KVSpec,
    Layout,
    Paged,
    Raw,
    Ring,
    Scoring,
    create_layer,
)
from jaxkv.core.alibi import alibi_slopes
from jaxkv.core.visibility import Visibility
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close
from tests.attention.formulas import head_attention, latent_attention, parameters, perturbed

HF = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "alibi" / "huggingface.json").read_text("utf-8")
)
H, T, D = 2, 6, 16
# Section 3 of the paper: of n heads, head i has 2 ** (-8 i / n).
SLOPES = np.array([2.0**-4, 2.0**-8])
LARGE = (0.75, 0.25)
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def made(variant: Any, alibi: Any = True, **options: Any) -> Any:
    attn = variant(D, H, score=ScoreOptions(alibi=alibi), **options, rngs=nnx.Rngs(0))
    return perturbed(attn)


MODULES: dict[str, Any] = {
    "mha": functools.partial(made, MultiHeadAttention),
    "gqa": functools.partial(made, GroupedQueryAttention, LARGE, num_kv_heads=1),
    **{
        f"mla {form}": functools.partial(
            made, MultiHeadLatentAttention, LARGE, latent=LatentOptions(12, 4, form=form)
        )
        for form in ("absorbed", "expanded")
    },
}


@pytest.mark.parametrize("name", MODULES)
def test_rop_13_cached_decode_equals_the_full_forward(name: str) -> None:
    attn = MODULES[name]()
    slopes = SLOPES if name == "mha" else np.array(LARGE)
    if name.startswith("mla"):
        want = latent_attention(parameters(attn), X, 4, slopes=slopes)
    else:
        want = head_attention(parameters(attn), X, slopes=slopes)
    full, _ = call(attn, X)
    assert_close(full, want, 1e-5)
    for widths in ([1] * T, [4, 1, 1]):
        assert_close(feed(attn, X, attn.init_cache(2, 8), widths)[0], want, 1e-5)


def test_the_attention_of_bloom() -> None:
    made, heads = HF["attention"], HF["attention"]["heads"]
    x, weights = (np.asarray(made["x"], np.float32), made["weights"])
    features = x.shape[-1]
    width = features // heads
    score = ScoreOptions(alibi=True)
    attn = MultiHeadAttention(features, heads, use_bias=True, score=score, rngs=nnx.Rngs(0))
    # Its rows are head by head, and of each head queries, keys and values.
    fused = np.asarray(weights["query_key_value.weight"], np.float32)
    kernels = fused.reshape(heads, 3, width, features).transpose(1, 3, 0, 2)
    biases = np.asarray(weights["query_key_value.bias"], np.float32).reshape(heads, 3, width)
    for i, name in enumerate(("query", "key", "value")):
        projection = getattr(attn, name)
        projection.kernel[...], projection.bias[...] = kernels[i], biases[:, i]
    dense = np.asarray(weights["dense.weight"], np.float32)
    attn.out.kernel[...] = dense.T.reshape(heads, width, features)
    attn.out.bias[...] = np.asarray(weights["dense.bias"], np.float32)
    want = np.asarray(made["y"])
    assert_close(call(attn, x)[0], want, 1e-5)
    assert_close(feed(attn, x, attn.init_cache(1, 16), [7, 1, 1, 1])[0], want, 1e-5)


# The codecs store zeros and ones exactly.
CACHES: dict[str, tuple[Layout, Codec]] = {
    "contiguous": (Contiguous(), Raw(jnp.float32)),
    "ring": (Ring(T), Raw(jnp.float32)),
    "paged, int8": (Paged(2), Int8()),
    "evicting": (Evicting(T), Raw(jnp.float32)),
    "kivi": (Contiguous(), Kivi(bits=8, group=2, dtype=jnp.float32)),
}


@pytest.mark.parametrize("name", CACHES)
def test_rop_13_a_step_sees_slopes_times_distance(name: str) -> None:
    # Queries of 0 leave nothing but the bias, and value j is the j-th unit vector, so outputs are
    # weights: their logarithms, less that of the token itself, are slope x (j - p).
    layout, codec = CACHES[name]
    rule, slopes = Visibility(window=T), jnp.asarray(alibi_slopes(H), jnp.float32)
    cache = create_layer(KVSpec(1, 4, T), codec, 1, 8, layout=layout)

    @jax.jit
    def step(cache: Any, key: Any, value: Any) -> Any:
        query = jnp.zeros((1, 1, H, 4))
        return cache.extend(query, key, value, Scoring(rule, 1.0), alibi_slopes=slopes)

    for p in range(T):
        key = X[:1, p : p + 1, None, :4]
        out, _, cache = step(cache, key, np.eye(T, dtype=np.float32)[None, p : p + 1, None])
        row = np.log(np.asarray(out)[0, 0, :, : p + 1])
        want = SLOPES[:, None] * (np.arange(p + 1) - p)
        np.testing.assert_allclose(row - row[:, p:], want, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
def test_distances_count_real_tokens(cached: bool) -> None:
    attn = made(MultiHeadAttention, LARGE)
    want, _ = call(attn, X)
    # The same tokens with padding before, between and after them.
    real = np.array([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0]] * 2)
    x = np.full((2, 10, D), np.nan, np.float32)
    x[real != 0] = X.reshape(-1, D)
    got, _ = call(attn, x, attn.init_cache(2, 8) if cached else None, segment_ids=real)
    assert_close(got[real != 0].reshape(want.shape), want)


def test_both_forms_of_latents_weigh_tokens_alike() -> None:
    outs, kept = [], []
    for form in ("absorbed", "expanded"):
        attn = MODULES[f"mla {form}"]()
        out, cache = feed(attn, X, attn.init_cache(2, 8, layout=Evicting(4, H2O())), [1] * T)
        outs.append(out)
        kept.append(cache.index.state)
    assert_close(outs[1], outs[0])
    np.testing.assert_array_equal(kept[1].order, kept[0].order)
    assert_close(kept[1].weight, kept[0].weight)


def test_slopes_are_no_parameters() -> None:
    plain = MultiHeadAttention(D, H, rngs=nnx.Rngs(0))
    states = [nnx.state(attn, nnx.Param) for attn in (plain, made(MultiHeadAttention))]
    shapes = [jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) for state in states]
    assert shapes[0] == shapes[1]
