# SPDX-License-Identifier: Apache-2.0
"""Options that make no sense are named, and NaN in padding reaches no parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (dict(soft_cap=0.0), "soft_cap=0.0"),
        (dict(soft_cap=-1.0), "soft_cap=-1.0"),
        (dict(scale=float("nan")), "scale=nan"),
        (dict(pinned=-1), "pinned=-1"),
        (dict(alibi=0.5), "alibi=0.5: want True, False or a tuple"),
        (dict(alibi=(0.5, float("inf"))), r"alibi=\(0.5, inf\)"),
        (dict(alibi=("a",)), "want True, False or a tuple of finite slopes"),
    ],
)
def test_score_options_out_of_range_are_named(bad: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        jaxkv.ScoreOptions(**bad)


@pytest.mark.parametrize(
    ("bad", "says"),
    [(dict(rotary=True), "want a Rotary"), (dict(numerics=jnp.bfloat16), "want a Numerics")],
)
def test_options_of_another_kind_are_named(bad: dict, says: str) -> None:
    for variant in (jaxkv.MultiHeadAttention, jaxkv.MultiHeadLatentAttention):
        with pytest.raises(ValueError, match=says):
            variant(24, 4, rngs=nnx.Rngs(0), **bad)


@pytest.mark.parametrize(
    "variant", [jaxkv.MultiHeadAttention, jaxkv.MultiHeadLatentAttention, jaxkv.CrossAttention]
)
def test_slopes_for_other_heads_or_two_sequences_are_named(variant: type) -> None:
    says = "two sequences" if variant is jaxkv.CrossAttention else "alibi has 3 slopes: want 4"
    with pytest.raises(ValueError, match=says):
        variant(24, 4, score=jaxkv.ScoreOptions(alibi=(0.5, 0.2, 0.1)), rngs=nnx.Rngs(0))


def test_a_module_in_place_of_a_factory_is_named() -> None:
    attn = jaxkv.MultiHeadAttention(24, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="MultiHeadAttention: want a factory"):
        jaxkv.Decoder(50, 24, 2, attn, rngs=nnx.Rngs(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("variant", [jaxkv.GroupedQueryAttention, jaxkv.MultiHeadLatentAttention])
def test_nan_in_padding_reaches_no_gradient(variant: type, cached: bool) -> None:
    attn = variant(32, 4, rotary=jaxkv.Rotary(), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 7, 32))
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    real = (segments != 0)[..., None]

    @jax.jit
    @jax.grad
    def gradient(attn: nnx.Module, x: jax.Array) -> jax.Array:
        cache = attn.init_cache(2, 8) if cached else None
        return jnp.sum(attn(x, segment_ids=segments, cache=cache)[0] ** 2)

    clean = jax.tree.leaves(gradient(attn, jnp.where(real, x, 0.0)))
    poisoned = jax.tree.leaves(gradient(attn, jnp.where(real, x, jnp.nan)))
    for want, got in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(got, want)
