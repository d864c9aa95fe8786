# SPDX-License-Identifier: Apache-2.0
"""Orders, positions and compaction of the tokens of one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def orders(length: int) -> jax.Array:
    """Counts the tokens of a row: int32 `[1, T]`, the same for every row."""
    return jnp.arange(length, dtype=jnp.int32)[None]


def segments_from_lengths(lengths: jax.Array, length: int) -> jax.Array:
    """Marks the first `lengths[b]` tokens as segment 1 and the rest as padding.

    >>> segments_from_lengths(jnp.array([2, 0]), 3).tolist()
    [[1, 1, 0], [0, 0, 0]]
    """
    return (orders(length) < lengths[:, None]).astype(jnp.int32)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Counts the tokens of each document from its first one, skipping padding.

    Left padding and packing are the same mechanism: a row's real tokens, and every packed
    document, start at 0. The tokens of a document stand together, but for padding. Padding
    (segment 0) is given position 0.

    Args:
      segment_ids: int32 `[B, T]`.

    Returns:
      int32 `[B, T]`, in tokens.

    >>> segment_positions(jnp.array([[0, 0, 1, 0, 1, 2, 2]])).tolist()
    [[0, 0, 0, 0, 1, 0, 1]]
    """
    real = segment_ids != 0
    index = jnp.broadcast_to(orders(segment_ids.shape[1]), segment_ids.shape)
    last_real = jax.lax.cummax(jnp.where(real, index, -1), axis=1)
    before = jnp.pad(last_real[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    starts = real & ((before < 0) | (segment_ids != previous))
    rank = jnp.cumsum(real.astype(jnp.int32), axis=1) - 1
    start_rank = jax.lax.cummax(jnp.where(starts, rank, 0), axis=1)
    return jnp.where(real, rank - start_rank, 0)


def compaction(segment_ids: jax.Array) -> jax.Array:
    """Orders the tokens of each row so that real ones come first, in their order.

    Args:
      segment_ids: int32 `[B, T]`; 0 is padding.

    Returns:
      int32 `[B, T]`: `order[b, i]` is the token that goes to place i.

    >>> compaction(jnp.array([[0, 0, 1, 1]])).tolist()
    [[2, 3, 0, 1]]
    """
    padding = (segment_ids == 0).astype(jnp.int32)
    return jnp.argsort(padding, axis=1, stable=True).astype(jnp.int32)


def take_tokens(x: jax.Array, order: jax.Array) -> jax.Array:
    """Reorders the token axis: `x [B, T, ...]`, `order int32[B, T]`."""
    index = order.reshape(order.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
