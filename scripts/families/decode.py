# SPDX-License-Identifier: Apache-2.0
"""Decode at full and at 1/8 live caches (goals 1 and 2), and whole modules (goal 10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from families.measuring import Case, Sizes, Step, Timed, random
from families.steps import jax_step, our_step
from flax import nnx

import jaxkv

# Bounds on ours / jax.nn with all of 8,192 slots live, and with an eighth of them.
FULL = {
    (1, "float32"): 0.22,
    (1, "bfloat16"): 0.22,
    (8, "float32"): 0.16,
    (8, "bfloat16"): 0.22,
}
EIGHTH = {"float32": 0.06, "bfloat16": 0.10}


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    """Lists the family."""
    slots = sizes.slots
    for batch in (1, 8):
        for name in ("float32", "bfloat16"):
            for live in (slots, slots // 8):
                goal = FULL[batch, name] if live == slots else EIGHTH[name]
                yield against_jax(sizes, [live] * batch, name, goal)
    for batch, size in ((1, slots), (8, max(slots // 8, 256))):
        yield Timed(
            f"module, MHA {sizes.heads} heads, B={batch} float32 live {size} of {size}",
            "flax.nnx",
            lambda b=batch, s=size: our_module(sizes, b, s, jnp.float32),
            lambda b=batch, s=size: flax_module(sizes, b, s, jnp.float32),
            sizes.goal(0.35),
        )


def against_jax(sizes: Sizes, lengths: list[int], name: str, goal: float) -> Timed:
    """Sets one decode step against that of `jax.nn`."""
    dtype = jnp.dtype(name)
    return Timed(
        f"B={len(lengths)} {name} live {lengths[-1]} of {sizes.slots}",
        "jax.nn",
        lambda: our_step(sizes, lengths, dtype),
        lambda: jax_step(sizes, lengths, dtype),
        sizes.goal(goal),
    )


def our_module(sizes: Sizes, batch: int, slots: int, dtype: Any) -> Step:
    """One decode step of `MultiHeadAttention`, projections included, into a full-size cache."""
    features = sizes.heads * sizes.width
    numerics = jaxkv.Numerics(dtype=dtype, param_dtype=dtype)
    module = jaxkv.MultiHeadAttention(features, sizes.heads, numerics=numerics, rngs=nnx.Rngs(0))
    cache = module.init_cache(batch, slots)
    index = dataclasses.replace(cache.index, lengths=jnp.full((batch,), slots - 1, jnp.int32))
    held = [dataclasses.replace(cache, index=index)]
    x = random((batch, 1, features), dtype, 2)

    def step(module: Any, x: jax.Array, cache: Any) -> Any:
        y, cache = module(x, cache=cache)
        return y, cache.rollback(1)

    compiled = jax.jit(step, donate_argnums=2)

    def run() -> Any:
        y, held[0] = compiled(module, x, held[0])
        return y

    return run


def flax_module(sizes: Sizes, batch: int, slots: int, dtype: Any) -> Step:
    """The same with `flax.nnx.MultiHeadAttention(decode=True)`, under plain `jax.jit`."""
    features = sizes.heads * sizes.width
    module = nnx.MultiHeadAttention(
        sizes.heads,
        features,
        dtype=dtype,
        param_dtype=dtype,
        use_bias=False,
        decode=True,
        rngs=nnx.Rngs(0),
    )
    module.init_cache((batch, slots, features), dtype=dtype)
    module.cache_index[...] = jnp.asarray(slots - 1, module.cache_index[...].dtype)
    graph, kept, rest = nnx.split(module, nnx.Cache, ...)
    held = [kept]
    x = random((batch, 1, features), dtype, 2)

    def step(kept: Any, rest: Any, x: jax.Array) -> Any:
        module = nnx.merge(graph, kept, rest)
        y = module(x)
        module.cache_index[...] = module.cache_index[...] - 1
        return y, nnx.split(module, nnx.Cache, ...)[1]

    compiled = jax.jit(step, donate_argnums=0)

    def run() -> Any:
        y, held[0] = compiled(held[0], rest, x)
        return y

    return run
