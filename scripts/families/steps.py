# SPDX-License-Identifier: Apache-2.0
"""One decode step of a cache, and the same step with `jax.nn`: what most families time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from families.measuring import Sizes, Step, random

import jaxkv
from jaxkv.cache import Codec, KVSpec, Layout, Raw, Scoring, create_layer
from jaxkv.cache.layer_cache import LayerCache

# Tokens that are stored at once when a cache is filled.
FILL = 128


def our_step(
    sizes: Sizes,
    lengths: list[int],
    dtype: Any,
    *,
    slots: int | None = None,
    layout: Layout | None = None,
    codec: Codec | None = None,
) -> Step:
    """Attends to the live tokens and writes one more, in place; then takes it back.

    Args:
      sizes: Heads and widths.
      lengths: Tokens of each row, the new one included.
      dtype: Of queries, keys and values.
      slots: What is allocated for each row, default as `sizes` says.
      layout: Of the cache, default contiguous.
      codec: Of the cache, default raw.
    """
    spec = KVSpec(sizes.kv_heads, sizes.width, sizes.width)
    codec, batch, slots = codec or Raw(dtype), len(lengths), slots or sizes.slots
    cache = create_layer(spec, codec, batch, slots, layout=layout)
    held = [filled(cache, [n - 1 for n in lengths], dtype, slots)]
    query = random((batch, 1, sizes.heads, sizes.width), dtype, 2)
    new = random((batch, 1, sizes.kv_heads, sizes.width), dtype, 3)
    rule = jaxkv.Visibility()

    def step(cache: LayerCache, query: jax.Array, new: jax.Array) -> Any:
        out, _, cache = cache.extend(query, new, new, Scoring(rule, sizes.width**-0.5))
        return out, cache.rollback(1)

    compiled = jax.jit(step, donate_argnums=0)

    def run() -> jax.Array:
        out, held[0] = compiled(held[0], query, new)
        return out

    return run


def filled(cache: LayerCache, lengths: list[int], dtype: Any, slots: int) -> LayerCache:
    """Stores random tokens through the cache's own verbs, `lengths` of them in each row.

    Up to `FILL` slots they are those that `jax_step` begins with.
    """
    spec, left, size = cache.records.spec, np.asarray(lengths), min(FILL, slots)
    shape = (len(lengths), size, spec.kv_heads)
    key = random((*shape, spec.key_width), dtype, 1)
    value = random((*shape, spec.value_width), dtype, 4) if spec.value_offset is None else None
    while (left > 0).any():
        cache = _stored(cache, key, value, jnp.asarray(np.clip(left, 0, size), jnp.int32))
        left = left - size
    if np.any(cache.overflowed) or cache.lengths.tolist() != lengths:
        raise ValueError(f"{cache} did not take rows of {lengths} tokens.")
    return cache


@functools.partial(jax.jit, donate_argnums=0)
def _stored(
    cache: LayerCache, key: jax.Array, value: jax.Array | None, count: jax.Array
) -> LayerCache:
    return cache.open(key.shape[1], count).write(key, value).close()


def jax_step(sizes: Sizes, lengths: list[int], dtype: Any, *, slots: int | None = None) -> Step:
    """The same with `jax.nn.dot_product_attention` over a `[B, S, K, H]` cache with lengths."""
    batch = len(lengths)
    shape = (batch, slots or sizes.slots, sizes.kv_heads, sizes.width)
    held = [(random(shape, dtype, 1), random(shape, dtype, 4))]
    query = random((batch, 1, sizes.heads, sizes.width), dtype, 2)
    new = random((batch, 1, sizes.kv_heads, sizes.width), dtype, 3)
    rows = jnp.asarray(lengths, jnp.int32)

    def step(cache: Any, query: jax.Array, new: jax.Array, lengths: jax.Array) -> Any:
        def put(row: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(row, x, (at, 0, 0))

        key, value = (jax.vmap(put)(x, new, lengths - 1) for x in cache)
        out = jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)
        return out, (key, value)

    compiled = jax.jit(step, donate_argnums=0)

    def run() -> jax.Array:
        out, held[0] = compiled(held[0], query, new, rows)
        return out

    return run
