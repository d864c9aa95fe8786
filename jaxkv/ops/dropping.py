# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention weights, decided weight by weight from where it stands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from jaxkv.ops.operands import Operands


def dropout_seeds(key: jax.Array, rows: int, heads: int) -> jax.Array:
    """Draws what the weights of each row and head are decided by: uint32 `[B, N, 2]`."""
    return jax.random.bits(key, (rows, heads, 2), jnp.uint32)


def dropped(weights: jax.Array, o: Operands) -> jax.Array:
    """Drops weights `[B, N, T, S]` of a whole call and scales up the others."""
    if o.dropout_seeds is None:
        return weights
    T, S = weights.shape[2:]
    keep = kept(o.dropout_seeds, jnp.arange(T), jnp.arange(S), o.dropout_rate)
    return jnp.where(keep, weights / (1.0 - o.dropout_rate), 0.0)


def kept(seeds: jax.Array, queries: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
    """Decides which weights dropout keeps.

    Args:
      seeds: uint32 `[..., 2]`, one pair per row and head.
      queries: int32 `[t]`, the queries' places in the call.
      keys: int32 `[s]`, the keys' places in the call.
      rate: Share of the weights that are dropped.

    Returns:
      bool `[..., t, s]`. A weight's fate hangs on its own place, so that every implementation,
      tile and mesh drops the same ones.

    Source: Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    shape = (*seeds.shape[:-1], queries.size, keys.size)
    words = (
        seeds[..., 0][..., None, None],
        seeds[..., 1][..., None, None],
        queries.astype(jnp.uint32)[:, None],
        keys.astype(jnp.uint32)[None, :],
    )
    words = [
        jnp.broadcast_to(w.reshape((1,) * (len(shape) - w.ndim) + w.shape), shape) for w in words
    ]
    bits = threefry2x32_p.bind(*words)[0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
