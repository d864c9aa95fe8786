# SPDX-License-Identifier: Apache-2.0
"""The tokens of one call: where they stand, which are real, and how padding is kept out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.cache.index import Plan
from jaxkv.core.positions import (
    orders,
    segment_positions,
    segments_from_lengths,
    take_tokens,
)
from jaxkv.core.trees import check_arrays
from jaxkv.ops.api import check_lengths


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Where the tokens of a call stand.

    Attributes:
      order: int32 `[B|1, T]`, for visibility: the token's number in its row (or document).
      positions: int32 `[B|1, T]`, for rotary and learned embeddings.
      segments: int32 `[B, T]`, 0 is padding; `None` if all tokens are real and of one document.
      gapless: Whether no padding can stand between tokens, so that their places tell distances.
    """

    order: jax.Array
    positions: jax.Array
    segments: jax.Array | None
    gapless: bool


def uncached_tokens(
    batch: int,
    length: int,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    lengths: jax.Array | None,
) -> Tokens:
    """Places the tokens of a call without a cache."""
    check_token_arguments(batch, length, positions, segment_ids, lengths)
    real = None if lengths is None else segments_from_lengths(lengths, length)
    if segment_ids is None:
        segments, order = real, orders(length)  # padding by lengths is behind all tokens
    else:
        segments = segment_ids if real is None else jnp.where(real != 0, segment_ids, 0)
        order = segment_positions(segments)
    positions = order if positions is None else positions.astype(jnp.int32)
    return Tokens(order, positions, segments, gapless=segment_ids is None)


def cached_tokens(plan: Plan, length: int, positions: jax.Array | None) -> Tokens:
    """Places the (compacted) tokens of a call that continues a cache."""
    order = plan.start[:, None] + orders(length)
    real = (orders(length) < plan.count[:, None]).astype(jnp.int32)
    positions = None if positions is None else positions.astype(jnp.int32)
    if positions is not None and plan.order is not None:
        shape = (order.shape[0], length)
        positions = take_tokens(jnp.broadcast_to(positions, shape), plan.order)
    return Tokens(order, order if positions is None else positions, real, gapless=True)


def emptied(x: jax.Array, tokens: Tokens) -> jax.Array:
    """Zeroes padding in `[B, T, D]`: NaN times a gradient of 0 would reach the kernels."""
    if tokens.segments is None:
        return x
    return jnp.where((tokens.segments != 0)[:, :, None], x, jnp.zeros((), x.dtype))


def compacted(x: jax.Array, plan: Plan) -> jax.Array:
    """Moves real tokens to the front of each row, `[B, T, ...]`, if padding may stand elsewhere."""
    return x if plan.order is None else take_tokens(x, plan.order)


def restored(x: jax.Array, plan: Plan) -> jax.Array:
    """Undoes `compacted`."""
    if plan.order is None:
        return x
    inverse = jnp.argsort(plan.order, axis=1).astype(jnp.int32)
    return take_tokens(x, inverse)


def compacted_rows(x: jax.Array | None, plan: Plan) -> jax.Array | None:
    """Compacts the query axis of a mask or bias `[B|1, N|1, T|1, S]`, `[T, S]` or `[S]`."""
    if x is None or plan.order is None or x.ndim == 1 or x.shape[-2] == 1:
        return x
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    x = jnp.broadcast_to(x, (plan.order.shape[0], *x.shape[1:]))
    return take_tokens(x.swapaxes(1, 2), plan.order).swapaxes(1, 2)


def check_token_arguments(
    batch: int,
    length: int,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    lengths: jax.Array | None,
) -> None:
    """Checks the shapes and dtypes of a call's token arguments.

    Raises:
      ValueError: Naming the argument, what was passed and what fits.
    """
    check_arrays(positions=positions, segment_ids=segment_ids)
    for name, x in (("positions", positions), ("segment_ids", segment_ids)):
        if x is None:
            continue
        fits = x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == length
        if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"{name} {x.dtype}{x.shape}: want int32 ({batch}, {length}) or (1, {length})."
            )
    if lengths is not None:
        check_lengths("lengths", lengths, length, batch)
