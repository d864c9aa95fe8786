# SPDX-License-Identifier: Apache-2.0
"""A bad call says what was passed and what fits, when the module is built or traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import (
    CrossAttention,
    GroupedQueryAttention,
    LatentOptions,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    ScoreOptions,
)
from jaxkv.cache import Paged
from jaxkv.cache.codecs import Raw
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.core.rotary_scaling import DynamicNTK

RNGS = nnx.Rngs(0)
X = jnp.zeros((2, 3, 16))
VARIANTS = [
    MultiHeadAttention,
    MultiQueryAttention,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    CrossAttention,
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)


def made(variant: Any = MultiHeadAttention, **options: Any) -> Any:
    """Makes a module of 16 features and 4 heads, without drawing parameters."""
    options = {"in_features": 16, "num_heads": 4, **options}
    return nnx.eval_shape(lambda: variant(**options, rngs=nnx.Rngs(0)))


def traced(attn: Any, x: Any = X, **given: Any) -> Any:
    """Traces a call; values of the given arrays are not known."""
    return jax.eval_shape(lambda attn, x, given: attn(x, **given), attn, x, given)


BUILDING: dict[str, tuple[Callable[[], Any], str]] = {
    "width and heads": (
        lambda: made(num_heads=5),
        "in_features=16 does not divide over 5 heads: pass head_dim",
    ),
    "no heads": (lambda: made(num_heads=0), "num_heads=0: want an int of at least 1"),
    "half a head": (lambda: made(num_heads=2.0), "num_heads=2.0: want an int of at least 1"),
    "half a head of a latent": (
        lambda: made(MultiHeadLatentAttention, num_heads=2.0),
        "num_heads=2.0: want an int",
    ),
    "half a width": (lambda: made(head_dim=4.0), "head_dim=4.0: want an int of at least 1"),
    "half a KV head": (
        lambda: made(GroupedQueryAttention, num_kv_heads=2.0),
        "cannot share 2.0 KV heads",
    ),
    "KV heads of a variant that has one": (
        lambda: made(MultiQueryAttention, num_kv_heads=1),
        r"unknown options \['num_kv_heads'\]",
    ),
    "kv heads": (
        lambda: made(GroupedQueryAttention, num_kv_heads=3),
        "4 query heads cannot share 3 KV heads: want a divisor of 4",
    ),
    "a misspelt option": (
        lambda: made(windows=3),
        r"unknown options \['windows'\]: want of .*'window'",
    ),
    "an option of another variant": (
        lambda: made(MultiHeadLatentAttention, num_kv_heads=2),
        r"unknown options \['num_kv_heads'\]",
    ),
    "window": (lambda: made(window=0), "window=0: want W >= 1 keys"),
    "window without a side": (
        lambda: made(causal=False, window=3),
        r"window=3 with causal=False .* want \(left, right\), for example \(2, 0\)",
    ),
    "pinned": (lambda: made(score=ScoreOptions(pinned=2)), "pinned=2: want .* a window"),
    "window of a flag": (lambda: made(window=True), "window=True: want W >= 1"),
    "window of a part": (lambda: made(window=2.5), "window=2.5: want W >= 1"),
    "causal": (lambda: made(causal="no"), "causal='no': want True or False"),
    "biases": (lambda: made(use_bias="kv"), "use_bias='kv': want True, False or 'qkv'"),
    "form": (lambda: LatentOptions(form="foo"), "form='foo': want one of"),
    "whole numbers to compute in": (
        lambda: Numerics(dtype=jnp.int32),
        "dtype=.*int32.*: want a float",
    ),
    "dropout": (lambda: made(dropout_rate=1.0), "dropout_rate=1.0: want 0 <= rate < 1"),
    "rotary of an odd head": (
        lambda: made(in_features=12, rotary=Rotary()),
        "3",
    ),
    "qk_norm of a latent": (
        lambda: made(MultiHeadLatentAttention, score=ScoreOptions(qk_norm=True)),
        "qk_norm: latent attention normalises its latents",
    ),
    "rngs": (lambda: MultiHeadAttention(16, 4), r"rngs is missing: want nnx.Rngs\(seed\)"),
    "cross, causal": (lambda: made(CrossAttention, causal=True), "causal=True: .* no causal rule"),
    "cross, window": (lambda: made(CrossAttention, window=4), "window=4: queries and context"),
    "cross, rotary": (
        lambda: made(CrossAttention, rotary=Rotary()),
        r"rotary=Rotary\(.*no causal rule, window or rotation",
    ),
}


@pytest.mark.parametrize("name", list(BUILDING))
def test_building(name: str) -> None:
    build, message = BUILDING[name]
    with pytest.raises(ValueError, match=message):
        build()


CALLING: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"x": jnp.zeros((3, 16))}, r"x \(3, 16\): want \[B, T, 16\]"),
    "features": ({"x": jnp.zeros((2, 3, 8))}, r"x \(2, 3, 8\): want \[B, T, 16\]"),
    "numbers that are no floats": ({"x": jnp.zeros((2, 3, 16), int)}, "x is int32: want a float"),
    "positions": (
        {"positions": jnp.zeros((2, 4), jnp.int32)},
        r"positions int32\(2, 4\): want int32 \(2, 3\) or \(1, 3\)",
    ),
    "positions of no rotation": (
        {"positions": jnp.zeros((2, 3), jnp.int32)},
        "positions are for the rotation: build with rotary",
    ),
    "positions' dtype": (
        {"positions": jnp.zeros((2, 3))},
        r"positions float32\(2, 3\): want int32 \(2, 3\)",
    ),
    "segments": (
        {"segment_ids": jnp.zeros((3, 3), jnp.int32)},
        r"segment_ids int32\(3, 3\): want int32 \(2, 3\)",
    ),
    "lengths' shape": ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths int32\(3,\): want"),
    "lengths' dtype": ({"lengths": jnp.zeros((2,))}, r"lengths float32\(2,\): want int32 \(2,\)"),
    "a mask of numbers": ({"mask": jnp.ones((3, 3))}, "mask is float32: want bool, True = keep"),
    "a bias of booleans": ({"bias": jnp.ones((3, 3), bool)}, "bias is bool: want a float dtype"),
    "context": ({"context": X}, "MultiHeadAttention takes no context: CrossAttention does"),
    "context lengths": ({"context_lengths": jnp.zeros(2, jnp.int32)}, "takes no context"),
}


@pytest.mark.parametrize("name", list(CALLING))
def test_calling(name: str) -> None:
    given, message = CALLING[name]
    with pytest.raises(ValueError, match=message):
        traced(made(), **given)


LISTS = ["lengths", "segment_ids", "positions", "mask", "bias", "context"]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_no_array(name: str) -> None:
    attn = made(CrossAttention if name == "context" else MultiHeadAttention)
    with pytest.raises(ValueError, match=f"{name} is a list: want an array"):
        jax.eval_shape(lambda attn, x: attn(x, **{name: [1, 2]}), attn, X)


def test_a_cache_that_was_donated_is_named() -> None:
    attn = MultiHeadAttention(16, 4, rngs=nnx.Rngs(0))
    cache = attn.init_cache(2, 8)
    step = jax.jit(lambda attn, x, cache: attn(x, cache=cache), donate_argnums=2)
    _, after = step(attn, X, cache)
    with pytest.raises(ValueError, match="donated to an earlier call and is gone"):
        attn(X, cache=cache)
    assert repr(cache).startswith("LayerCache(rows=2, lengths=unknown, capacity=8")
    assert repr(after).startswith("LayerCache(rows=2, lengths=[3, 3], capacity=8, layers=1, bytes")


def test_values_that_are_known_are_checked() -> None:
    attn = MultiHeadAttention(16, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"lengths \[4, 1\]: want 0 to 3 tokens in each row"):
        attn(X, lengths=jnp.array([4, 1]))
    with pytest.raises(ValueError, match=r"lengths \[-1, 1\]: want 0 to 3 tokens"):
        attn(X, cache=attn.init_cache(2, 8), lengths=jnp.array([-1, 1]))
    with pytest.raises(ValueError, match=r"\[1, 2, 2\] pack several documents, but a cached row"):
        attn(X, cache=attn.init_cache(2, 8), segment_ids=jnp.array([[1, 2, 2], [1, 1, 1]]))


def test_lengths_and_segments_of_a_cached_call_exclude_each_other() -> None:
    attn = made()
    cache = attn.init_cache(2, 8)
    given = dict(lengths=jnp.array([3, 2]), segment_ids=jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="lengths and segment_ids both mark padding"):
        traced(attn, cache=cache, **given)


@every_variant
def test_a_cache_of_another_module(variant: Any) -> None:
    attn, other = made(variant), made(variant, in_features=24, num_heads=4)
    given = {"context": X} if variant is CrossAttention else {}
    message = rf"belongs to another module: it holds KVSpec\(.*\), {variant.__name__} stores KVSpec"
    with pytest.raises(ValueError, match=message):
        traced(attn, cache=other.init_cache(2, 8), **given)
    with pytest.raises(ValueError, match="the cache has .*3.* rows and x has 2: want the same"):
        traced(attn, cache=attn.init_cache(3, 8), **given)
    with pytest.raises(ValueError, match="cache is a dict: want a LayerCache of init_cache"):
        traced(attn, cache={}, **given)


def test_a_context_is_not_taken_for_tokens() -> None:
    own, cross = made(), made(CrossAttention)
    assert own.spec == cross.spec
    with pytest.raises(ValueError, match="it holds a context, MultiHeadAttention reads its own"):
        traced(own, cache=cross.init_cache(2, 8))
    with pytest.raises(ValueError, match="it holds its own tokens, CrossAttention reads a context"):
        traced(cross, cache=own.init_cache(2, 8))


@every_variant
def test_sizes_of_a_cache(variant: Any) -> None:
    attn = made(variant)
    with pytest.raises(ValueError, match="capacity=0"):
        attn.init_cache(2, 0)
    with pytest.raises(ValueError, match="capacity=8.0: want an int of at least 1"):
        attn.init_cache(2, 8.0)
    with pytest.raises(ValueError, match="batch=-1"):
        attn.init_cache(-1, 4)
    with pytest.raises(ValueError, match="lanes=0"):
        attn.init_cache(2, 4, lanes=0)
    with pytest.raises(ValueError, match="int8.*: want a float dtype"):
        attn.init_cache(2, 4, codec=Raw(jnp.int8))
    for layout in (Paged, "paged", Raw()):
        with pytest.raises(ValueError, match=r"layout=.*: want a layout such as"):
            attn.init_cache(2, 4, layout=layout)
        with pytest.raises(ValueError, match=r"layout=.*: want a layout such as"):
            attn.init_cache(2, 4).convert(layout=layout)
    for codec in (Raw, "int8", Paged(16)):
        with pytest.raises(ValueError, match=r"codec=.*: want a codec such as"):
            attn.init_cache(2, 4, codec=codec)


@every_variant
def test_dropout_needs_a_key_and_no_cache(variant: Any) -> None:
    attn = made(variant, dropout_rate=0.5)
    given = {"context": X} if variant is CrossAttention else {}
    with pytest.raises(ValueError, match=r"needs rngs=nnx.Rngs\(dropout=key\) in the call"):
        jax.eval_shape(lambda x: attn(x, **given, deterministic=False), X)
    cache = attn.init_cache(2, 8)
    with pytest.raises(ValueError, match="dropout is for training: call with deterministic=True"):
        jax.eval_shape(
            lambda x: attn(x, cache=cache, **given, deterministic=False, rngs=nnx.Rngs(0)), X
        )


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=lambda v: v.__name__)
def test_rop_03_a_module_refuses_dynamic_ntk_with_a_cache(variant: Any) -> None:
    rotary = Rotary(scaling=DynamicNTK(2.0, 8))
    attn = variant(16, 2, rotary=rotary, rngs=nnx.Rngs(0))
    y, _ = attn(jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 16)), jnp.float32))
    assert jnp.isfinite(y).all()
    with pytest.raises(ValueError, match="DynamicNTK"):
        attn.init_cache(1, 16)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_latent_cache_checks_masks_in_both_forms(form: Any) -> None:
    attn = made(MultiHeadLatentAttention, latent=LatentOptions(form=form))
    with pytest.raises(ValueError, match=r"mask \(3, 3\) does not fit: .* T=3, S=8"):
        traced(attn, cache=attn.init_cache(2, 8), mask=jnp.ones((3, 3), bool))
