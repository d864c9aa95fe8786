# SPDX-License-Identifier: Apache-2.0
"""How much attention each key got: what score-based eviction goes by."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.blocks import Unit
from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import Index
from jaxkv.cache.read import block_scores, block_weights, by_tile, grouped_queries
from jaxkv.cache.reading import Reading, Tile
from jaxkv.core.indexing import item
from jaxkv.ops.operands import Extras, distances, modified

# Queries whose weights are made at a time: bounds the temporaries of a long prompt.
QUERY_BLOCK = 128


class Observers(NamedTuple):
    """The queries that weigh.

    Attributes:
      query: `[B, n, N, H]`.
      order: int32 `[B, n]`, ascending.
      lse: float32 `[B, n, N]` over all that they saw; -inf for one that does not count.
    """

    query: jax.Array
    order: jax.Array
    lse: jax.Array


def last_observers(n: int, query: jax.Array, lse: jax.Array, plan: tuple) -> Observers:
    """Picks each row's last `n` real queries.

    Args:
      n: How many, at most T.
      query: `[B, T, N, H]`.
      lse: float32 `[B, T, N]`.
      plan: The row's first order and its count of real tokens, each int32 `[B]`.

    Returns:
      The queries; where a row has fewer, the first ones do not count.
    """
    start, count = plan
    T = query.shape[1]
    token = jnp.arange(n, dtype=jnp.int32)[None] + (T if n == T else count[:, None]) - n
    inside = jnp.clip(token, 0, T - 1)
    if n < T:
        query = jnp.take_along_axis(query, inside[:, :, None, None], axis=1)
        lse = jnp.take_along_axis(lse, inside[:, :, None], axis=1)
    counts = (token >= 0) & (token < count[:, None])
    return Observers(query, start[:, None] + inside, jnp.where(counts[:, :, None], lse, -jnp.inf))


def weigh_stored(
    how: Reading,
    seen_by: Observers,
    planes: Planes,
    index: Index,
    weights: Any,
    slopes: jax.Array | None,
) -> jax.Array:
    """Sums the attention that stored tokens got: float32 `[B, heads, S]`, heads of the read."""
    N = seen_by.query.shape[2]
    K = how.read_spec(N).kv_heads
    query = grouped_queries(seen_by.query, K)
    lse = grouped_queries(seen_by.lse[..., None], K)[..., 0]
    added = (weights, slopes)
    return by_tile(_stored, how, query, planes, lse, index, seen_by.order, *added)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stored(
    how: Reading,
    tile: Tile,
    query: jax.Array,
    planes: Planes,
    lse: jax.Array,
    index: Index,
    order: jax.Array,
    weights: Any,
    slopes: jax.Array | None,
) -> jax.Array:
    """Runs over every row's live blocks once more, now that the normaliser is known."""
    units = query.reshape(-1, tile.heads, *query.shape[2:])
    shift = _never_below(lse).reshape(-1, tile.heads, lse.shape[-1])

    def unit_body(_: None, u: jax.Array) -> tuple[None, jax.Array]:
        unit = Unit(how, tile, planes, index, order, None, u)
        q = item(units, u)

        def body(j: jax.Array, total: jax.Array) -> jax.Array:
            block, keys = unit.block(j)
            extras = unit.extras(None, slopes, keys, q.shape)
            scores = block_scores(how, q, block, weights, extras)
            p = block_weights(unit.seen(keys, q.shape), scores, item(shift, u))
            return unit.add_slots(total, jnp.sum(p, axis=1), j)

        none = jnp.zeros((tile.heads, tile.slots), jnp.float32)
        return None, lax.fori_loop(*unit.span(), body, none)

    out = lax.scan(unit_body, None, jnp.arange(units.shape[0], dtype=jnp.int32))[1]
    return out.reshape(*query.shape[:2], tile.slots)


def weigh_new(
    how: Reading,
    seen_by: Observers,
    key: jax.Array,
    key_order: jax.Array,
    slopes: jax.Array | None,
) -> jax.Array:
    """Sums the attention that a call's own tokens got.

    Args:
      how: Which key a query sees, and how scores are made.
      seen_by: The queries.
      key: `[B, T, K, H]`.
      key_order: int32 `[B, T]`, -1 for padding.
      slopes: `[N]`, ALiBi's, or `None`.

    Returns:
      float32 `[B, K, T]`.
    """
    B, n, N, H = seen_by.query.shape
    T, K = key.shape[1:3]
    size = min(QUERY_BLOCK, n)
    short = -n % size

    def blocks(x: jax.Array, fill: Any) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return padded.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)

    key = jnp.where((key_order >= 0)[:, :, None, None], key, jnp.zeros((), key.dtype))
    by_head = None if slopes is None else slopes.reshape(1, K, -1, 1, 1)

    def body(total: jax.Array, given: tuple) -> tuple[jax.Array, None]:
        query, order, lse = given
        query = query.reshape(B, size, K, N // K, H)
        scores = jnp.einsum(
            "bqkgh,btkh->bkgqt",
            query,
            key.astype(query.dtype),
            precision=how.precision,
            preferred_element_type=jnp.float32,
        )
        distance = None if slopes is None else distances(order, key_order)[:, None, None]
        scores = modified(how, scores, Extras(None, by_head, distance))
        seen = how.rule.allows(order[:, :, None], key_order[:, None, :])[:, None, None]
        shift = _never_below(lse).reshape(B, size, K, N // K).transpose(0, 2, 3, 1)
        return total + jnp.sum(block_weights(seen, scores, shift), axis=(2, 3)), None

    given = (blocks(seen_by.query, 0), blocks(seen_by.order, 0), blocks(seen_by.lse, -jnp.inf))
    return lax.scan(body, jnp.zeros((B, K, T), jnp.float32), given)[0]


def _never_below(lse: jax.Array) -> jax.Array:
    """Makes the shift of queries that do not count so large that they give every key 0."""
    return jnp.where(jnp.isfinite(lse), lse, jnp.finfo(jnp.float32).max)
