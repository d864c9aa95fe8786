# SPDX-License-Identifier: Apache-2.0
"""Latent attention in the absorbed form against expanding every key and value anew (goal 9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from families.measuring import Case, Counted, Sizes, Step, Timed, random
from families.steps import filled
from flax import nnx

import jaxkv
from jaxkv.attention.multi_head_latent import LatentOptions

# Ours / naive.
GOALS = {"float32": 1 / 40, "bfloat16": 1 / 25}


def latent_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family; the model is narrow, so that its projections weigh little."""
    C, R, N, H = sizes.latent, sizes.rope, sizes.latent_heads, sizes.width
    spec = nnx.eval_shape(lambda: make_module(sizes, jnp.float32)).spec
    kept = spec.elements_per_token
    yield Counted("numbers kept of a token", "latent + rotary", kept, C + R, "numbers", 1.0)
    yield Counted(
        "numbers kept of a token", "every head's key and value", kept, N * (2 * H + R), "numbers"
    )
    for name, goal in GOALS.items():
        dtype = jnp.dtype(name)
        yield Timed(
            f"{N} heads, {C} + {R}, B=1 {name} live {sizes.latent_slots}",
            "naive expansion",
            lambda d=dtype: absorbed(sizes, d),
            lambda d=dtype: naive(sizes, d),
            sizes.goal(goal),
        )


def make_module(sizes: Sizes, dtype: Any) -> jaxkv.MultiHeadLatentAttention:
    """Builds the module whose weights both use."""
    return jaxkv.MultiHeadLatentAttention(
        sizes.features,
        sizes.latent_heads,
        latent=LatentOptions(latent_dim=sizes.latent, rope_dim=sizes.rope),
        head_dim=sizes.width,
        numerics=jaxkv.Numerics(dtype=dtype, param_dtype=dtype),
        rngs=nnx.Rngs(0),
    )


def absorbed(sizes: Sizes, dtype: Any) -> Step:
    """One decode step of the module."""
    module, x = make_module(sizes, dtype), random((1, 1, sizes.features), dtype, 2)
    S = sizes.latent_slots
    held = [filled(module.init_cache(1, S), [S - 1], dtype, S)]

    def step(module: Any, x: jax.Array, cache: Any) -> Any:
        y, cache = module(x, cache=cache)
        return y, cache.rollback(1)

    compiled = jax.jit(step, donate_argnums=2)

    def run() -> jax.Array:
        y, held[0] = compiled(module, x, held[0])
        return y

    return run


def naive(sizes: Sizes, dtype: Any) -> Step:
    """The same step, with keys and values of every head made of the whole cache, then `jax.nn`."""
    module, x = make_module(sizes, dtype), random((1, 1, sizes.features), dtype, 2)
    C, S = sizes.latent, sizes.latent_slots
    cache = filled(module.init_cache(1, S), [S - 1], dtype, S)
    held = [cache.records.planes["key"][:, 0]]  # [1, S, C + R]

    def step(module: Any, x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, record, _ = module.project(x, jnp.full((1, 1), S - 1, jnp.int32))
        kept = jax.lax.dynamic_update_slice(kept, record[:, :, 0], (0, S - 1, 0))
        latent, shared = kept[..., :C], kept[..., None, C:]
        key = jnp.einsum("bsc,cnh->bsnh", latent, module.key_up[...])
        value = jnp.einsum("bsc,cnv->bsnv", latent, module.value_up[...])
        shared = jnp.broadcast_to(shared, (*key.shape[:3], shared.shape[-1]))
        key = jnp.concatenate([key, shared], axis=-1)
        value_width, pad = value.shape[-1], key.shape[-1] - value.shape[-1]
        value = jnp.pad(value, ((0, 0),) * 3 + ((0, pad),))  # `jax.nn` wants equal widths
        out = jax.nn.dot_product_attention(query, key, value, scale=module.scale)
        return module.out(out[..., :value_width]), kept

    compiled = jax.jit(step, donate_argnums=2)

    def run() -> jax.Array:
        y, held[0] = compiled(module, x, held[0])
        return y

    return run
