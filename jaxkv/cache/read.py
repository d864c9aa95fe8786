# SPDX-License-Identifier: Apache-2.0
"""Attention over the live part of a cache: a loop over blocks, with its own gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.blocks import Unit
from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import Index
from jaxkv.cache.reading import BlockView as BlockView
from jaxkv.cache.reading import Reading as Reading
from jaxkv.cache.reading import Tile, choose_tile
from jaxkv.cache.write import zero_cotangent
from jaxkv.core.indexing import item
from jaxkv.core.numerics import exp_below
from jaxkv.core.platform import by_platform
from jaxkv.ops.operands import Extras, modified


class Inputs(NamedTuple):
    """The arrays of one read that carry gradients, beside the query and the planes."""

    bias: jax.Array | None  # [B|1, N|1, T|1, S]
    slopes: jax.Array | None  # [N]
    weights: Any  # of the view


class Rows(NamedTuple):
    """Where the queries of one read stand, and what they may see."""

    index: Index
    q_order: jax.Array  # int32 [B, T]
    mask: jax.Array | None  # bool [B|1, N|1, T|1, S]


def read(
    how: Reading,
    query: jax.Array,
    planes: Planes,
    index: Index,
    q_order: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    weights: Any = None,
    slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to what a cache holds, block by live block.

    Args:
      how: The static choices.
      query: `[B, T, N, H]`, rows as in the index.
      planes: The records, each `[E, heads, S, ...]`.
      index: Which slots are live.
      q_order: int32 `[B, T]`, the order of each query in its row, ascending.
      mask: bool `[B|1, N|1, T|1, W]`, True = keep, by order of the key.
      bias: float, same shape, added to the scores.
      weights: Arrays of the view.
      slopes: `[N]`, ALiBi's: scores fall with the distance of the orders.

    Returns:
      `(out float32[B, T, N, V], lse float32[B, T, N])`; 0 and -inf where nothing is seen.

    The number of blocks that are read follows the live lengths, not the allocation. Slots that
    are not filled are emptied block by block, so what stands in them reaches nothing.
    """
    B, T, N, _ = query.shape
    spec = how.read_spec(N)
    K, V = spec.kv_heads, spec.value_width
    if B == 0 or T == 0:
        zero = jnp.zeros((B, T, N, V), jnp.float32)
        return zero, jnp.full((B, T, N), -jnp.inf, jnp.float32)
    inputs, rows = Inputs(bias, slopes, weights), Rows(index, q_order, mask)
    out, lse = _read(how, grouped_queries(query, K), planes, inputs, rows)
    out = out.reshape(B, N, T, -1).swapaxes(1, 2)
    return out, lse.reshape(B, N, T).swapaxes(1, 2)


def grouped_queries(x: jax.Array, kv_heads: int) -> jax.Array:
    """Puts all query rows of a KV head side by side: `[B, T, N, H]` to `[B, K, G T, H]`."""
    B, T, N, H = x.shape
    x = x.reshape(B, T, kv_heads, N // kv_heads, H).transpose(0, 2, 3, 1, 4)
    return x.reshape(B, kv_heads, -1, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(
    how: Reading, query: jax.Array, planes: Planes, inputs: Inputs, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Reads for queries `[B, K, M, H]`: `([B, K, M, V], [B, K, M])`, float32."""
    return by_tile(_outputs, how, query, planes, inputs, rows)


def by_tile(
    fn: Callable[..., Any], how: Reading, query: jax.Array, planes: Planes, *args: Any
) -> Any:
    """Runs a loop with the tile of the platform that the program is compiled for."""
    tiles = (choose_tile(how, cpu, query, planes) for cpu in (True, False))
    return by_platform(functools.partial(fn, how), *tiles, query, planes, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outputs(
    how: Reading, tile: Tile, query: jax.Array, planes: Planes, inputs: Inputs, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Runs the forward loop over every row and its heads."""
    B, K, M, H = query.shape
    V = how.read_spec(K).value_width if how.view is not None else how.spec.value_width
    units = query.reshape(-1, tile.heads, M, H)

    def unit_body(_: None, u: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        unit = Unit(how, tile, planes, rows.index, rows.q_order, rows.mask, u)
        q = item(units, u)

        def body(j: jax.Array, carry: tuple) -> tuple:
            top, total, acc = carry
            block, order = unit.block(j)
            seen = unit.seen(order, q.shape)
            extras = unit.extras(inputs.bias, inputs.slopes, order, q.shape)
            scores = block_scores(how, q, block, inputs.weights, extras)
            new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1))
            shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
            p = block_weights(seen, scores, shift)
            old = jnp.where(jnp.isfinite(top), exp_below(top - shift), 0.0)
            mixed = _mix(how, p.astype(q.dtype), block, inputs.weights)
            total = total * old + jnp.sum(p, axis=-1)
            return new_top, total, acc * old[..., None] + mixed

        empty = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
        start = (empty, jnp.zeros_like(empty), jnp.zeros((*q.shape[:2], V), jnp.float32))
        top, total, acc = lax.fori_loop(*unit.span(), body, start)
        none = total == 0
        total = jnp.where(none, 1.0, total)
        lse = jnp.where(none, -jnp.inf, jnp.where(none, 0.0, top) + jnp.log(total))
        return None, (acc / total[..., None], lse)

    numbers = jnp.arange(units.shape[0], dtype=jnp.int32)
    out, lse = lax.scan(unit_body, None, numbers)[1]
    return out.reshape(B, K, M, V), lse.reshape(B, K, M)


def _forward(
    how: Reading, query: jax.Array, planes: Planes, inputs: Inputs, rows: Rows
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    out, lse = _read(how, query, planes, inputs, rows)
    return (out, lse), (query, planes, inputs, rows, out, lse)


def _backward(how: Reading, saved: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple:
    """Runs the same blocks again: the flash-attention gradient (arXiv:2307.08691, 2.3.2)."""
    query, planes, inputs, rows, out, lse = saved
    d_out, d_lse = grads
    seen_any = jnp.isfinite(lse)
    shift = jnp.where(seen_any, lse, 0.0)
    delta = jnp.sum(d_out * out, axis=-1) - jnp.where(seen_any, d_lse, 0.0)
    args = (query, planes, inputs, rows, d_out, shift, delta)
    d_query, d_planes, d_inputs = by_tile(_gradients, how, *args)
    d_planes = {n: d_planes[n] if n in d_planes else zero_cotangent(x) for n, x in planes.items()}
    return d_query, d_planes, d_inputs, None


_read.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    how: Reading,
    tile: Tile,
    query: jax.Array,
    planes: Planes,
    inputs: Inputs,
    rows: Rows,
    d_out: jax.Array,
    shift: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, Planes, Inputs]:
    """Runs the backward loop: gradients of query, float planes, and inputs."""
    M, H = query.shape[2:]
    units = query.reshape(-1, tile.heads, M, H)
    d_outs = d_out.reshape(-1, tile.heads, *d_out.shape[2:])
    shifts, deltas = shift.reshape(-1, tile.heads, M, 1), delta.reshape(-1, tile.heads, M, 1)

    def unit_body(carry: tuple, u: jax.Array) -> tuple[tuple, jax.Array]:
        unit = Unit(how, tile, planes, rows.index, rows.q_order, rows.mask, u)
        q = item(units, u)

        def body(j: jax.Array, carry: tuple) -> tuple:
            d_q, d_planes, d_inputs = carry
            block, order = unit.block(j)
            extras = unit.extras(inputs.bias, inputs.slopes, order, q.shape)
            scores, pull = jax.vjp(
                functools.partial(block_scores, how), q, block, inputs.weights, extras
            )
            p = block_weights(unit.seen(order, q.shape), scores, item(shifts, u)[..., 0])
            _, pull_mix = jax.vjp(
                functools.partial(_mix, how), p.astype(q.dtype), block, inputs.weights
            )
            d_p, d_mixed, d_mixed_weights = pull_mix(item(d_outs, u))
            d_scores = p * (d_p.astype(jnp.float32) - item(deltas, u))
            d_q_part, d_scored, d_scored_weights, d_extras = pull(d_scores)
            parts = (d_scored_weights, d_mixed_weights)
            d_inputs = Inputs(
                unit.add_bias(d_inputs.bias, d_extras.bias, order),
                unit.add_slopes(d_inputs.slopes, d_extras.slopes),
                _added(d_inputs.weights, *parts),
            )
            d_planes = unit.add(j, d_planes, d_scored, d_mixed)
            return d_q + d_q_part.astype(jnp.float32), d_planes, d_inputs

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        d_q, d_planes, d_inputs = lax.fori_loop(*unit.span(), body, start)
        return (d_planes, d_inputs), d_q.astype(q.dtype)

    floats = {n: x for n, x in planes.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    start = (jax.tree.map(jnp.zeros_like, floats), wide)
    numbers = jnp.arange(units.shape[0], dtype=jnp.int32)
    (d_planes, d_inputs), d_query = lax.scan(unit_body, start, numbers)
    d_inputs = jax.tree.map(lambda g, x: g.astype(x.dtype), d_inputs, inputs)
    return d_query.reshape(query.shape), d_planes, d_inputs


def block_scores(
    how: Reading, query: jax.Array, block: Planes, weights: Any, extras: Extras
) -> jax.Array:
    spec, codec, block = how.viewed(query.shape[0], block, weights)
    return modified(how, codec.scores(spec, query, block, how.precision), extras)


def block_weights(seen: jax.Array, scores: jax.Array, shift: jax.Array) -> jax.Array:
    """Exponentiates the scores that are seen; others reach neither result nor gradient."""
    return jnp.where(seen, exp_below(jnp.where(seen, scores - shift[..., None], 0.0)), 0.0)


def _mix(how: Reading, p: jax.Array, block: Planes, weights: Any) -> jax.Array:
    spec, codec, block = how.viewed(p.shape[0], block, weights)
    return codec.mix(spec, p, block, how.precision)


def _added(total: Any, *parts: Any) -> Any:
    return jax.tree.map(lambda t, *xs: sum((x.astype(t.dtype) for x in xs), t), total, *parts)
