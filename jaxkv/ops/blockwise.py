# SPDX-License-Identifier: Apache-2.0
"""Attention tile by tile with its own gradient: linear memory, any platform, any feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.core.indexing import item, quotient, remainder
from jaxkv.core.numerics import exp_below, lone_row_doubled
from jaxkv.core.platform import by_platform
from jaxkv.ops.einsum import TILE_SCORES
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, cotangents, empty_result, modified, primals
from jaxkv.ops.tiles import add, put
from jaxkv.ops.walk import Tile, Walk


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """Flash attention in plain `lax`.

    Args:
      rows: Query rows of a tile, over all query heads of a KV head; `None` fits the platform.
      slots: Keys of a tile, in tokens; `None` fits the platform.

    Raises:
      ValueError: If a size is less than 1.

    Source: FlashAttention-2 (arXiv:2307.08691), sections 3.1 and 3.2.
    """

    rows: int | None = None
    slots: int | None = None
    name: str = "blockwise"

    def __post_init__(self) -> None:
        for name in ("rows", "slots"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: want a tile of at least 1.")

    def refuses(self, operands: Operands) -> str | None:
        """Refuses nothing."""
        del operands
        return None

    def yields(self, operands: Operands) -> str | None:
        """Yields where one tile holds everything."""
        T, S = operands.query.shape[1], operands.key.shape[1]
        return "has one tile" if T * S <= TILE_SCORES else None

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = dataclasses.replace(operands, sink_logits=None)
        out, lse = empty_result(o) or _attend(self, o)
        return add_sink(out, lse, operands.sink_logits)


def _product(o: Operands, spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies two tiles in float32, `heads` first in all."""
    rows = x.shape[1]
    x = lone_row_doubled(x, 1) if spec.startswith("hm") and "->hm" in spec else x
    out = jnp.einsum(spec, x, y, precision=o.precision, preferred_element_type=jnp.float32)
    return out[:, :rows] if "->hm" in spec else out


def _scores(o: Operands, tile: Tile, q: jax.Array, k: jax.Array) -> jax.Array:
    """Multiplies queries by keys: float32 `[heads, q, G, s]`."""
    raw = _product(o, "hmd,hsd->hms", q, k)
    return raw.reshape(q.shape[0], tile.walk.queries.size, o.groups, -1)


def _weights(seen: jax.Array, scores: jax.Array, shift: jax.Array) -> jax.Array:
    return jnp.where(seen, exp_below(jnp.where(seen, scores - shift[..., None], 0.0)), 0.0)


def _dropped(x: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    return x if keep is None else jnp.where(keep, x / (1.0 - rate), 0.0)


def _by_platform(fn: Callable[..., Any], how: Blockwise, *args: Any) -> Any:
    return by_platform(functools.partial(fn, how), True, False, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Blockwise, o: Operands) -> tuple[jax.Array, jax.Array]:
    return _by_platform(_outputs, how, o)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outputs(how: Blockwise, cpu: bool, o: Operands) -> tuple[jax.Array, jax.Array]:
    walk = Walk.of(o, cpu, how.rows, how.slots)
    B, T, N, _ = o.query.shape
    V, dtype = o.value.shape[-1], o.value.dtype

    def tiles(n: jax.Array, carry: tuple) -> tuple:
        u, i = quotient(n, walk.queries.count), remainder(n, walk.queries.count)
        live, count = walk.span(u, i)
        here = Tile(walk, u, i, jnp.int32(0))
        q = here.query()
        shape = (walk.heads, walk.queries.size, o.groups)

        def body(n: jax.Array, carry: tuple) -> tuple:
            top, total, acc = carry
            tile = Tile(walk, u, i, item(live, n))
            scores = modified(o, _scores(o, tile, q, tile.of_keys(o.key)), tile.extras())
            seen = jnp.broadcast_to(tile.seen(), scores.shape)
            # Masked once, for both that read them: the rule costs more than a tile's copy.
            scores = lax.optimization_barrier(jnp.where(seen, scores, -jnp.inf))
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
            p = exp_below(scores - shift[..., None])
            old = jnp.where(jnp.isfinite(top), exp_below(top - shift), 0.0)
            total = total * old + jnp.sum(p, axis=-1)
            p = _dropped(p, tile.kept(), o.dropout_rate).astype(dtype)
            mixed = _product(o, "hms,hsv->hmv", p.reshape(*q.shape[:2], -1), tile.of_keys(o.value))
            return new_top, total, acc * old.reshape(*q.shape[:2], 1) + mixed

        empty = jnp.full(shape, -jnp.inf, jnp.float32)
        start = (empty, jnp.zeros_like(empty), jnp.zeros((*q.shape[:2], V), jnp.float32))
        top, total, acc = lax.fori_loop(0, count, body, start)
        none = total == 0
        total = jnp.where(none, 1.0, total)
        lse = jnp.where(none, -jnp.inf, jnp.where(none, 0.0, top) + jnp.log(total))
        out = here.to_queries(acc / total.reshape(*q.shape[:2], 1))
        owned = None if walk.queries.even else walk.queries.owned(i)[None, :, None]
        return (
            put(
                carry[0],
                out,
                here.at_queries(carry[0]),
                None if owned is None else owned[..., None],
            ),
            put(
                carry[1],
                here.to_queries(lse.reshape(q.shape[:2])),
                here.at_queries(carry[1]),
                owned,
            ),
        )

    start = (jnp.zeros((B, T, N, V), dtype), jnp.zeros((B, T, N), jnp.float32))
    return lax.fori_loop(0, walk.units * walk.queries.count, tiles, start)


def _forward(how: Blockwise, o: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    extras = {n: getattr(o, n) for n in ("bias", "alibi_slopes")}
    wanted = {n: x is not None and x.perturbed for n, x in extras.items()}
    o = primals(o)
    out, lse = _attend(how, o)
    return (out, lse), (o, out, lse, Wanted(**wanted))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Says which gradients somebody asks for, of those that cost extra."""

    bias: bool
    alibi_slopes: bool


def _backward(how: Blockwise, saved: tuple, grads: tuple) -> tuple[Any]:
    o, out, lse, wanted = saved
    fn = functools.partial(_gradients, wanted)
    grads = _by_platform(fn, how, o, *cotangents(out, lse, *grads))
    names = ("query", "key", "value", "bias", "alibi_slopes")
    nothing = jax.tree.map(lambda _: None, o)
    return (dataclasses.replace(nothing, **dict(zip(names, grads, strict=True))),)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _gradients(
    wanted: Wanted,
    how: Blockwise,
    cpu: bool,
    o: Operands,
    d_out: jax.Array,
    shift: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array | None, ...]:
    walk = Walk.of(o, cpu, how.rows, how.slots)
    dtype = o.query.dtype

    def tiles(n: jax.Array, carry: tuple) -> tuple:
        u, i = quotient(n, walk.queries.count), remainder(n, walk.queries.count)
        live, count = walk.span(u, i)
        here = Tile(walk, u, i, jnp.int32(0))
        q, d_o = here.query(), here.of_queries(d_out)
        shape = (walk.heads, walk.queries.size, o.groups)
        shifts = here.of_queries(shift).reshape(shape)
        deltas = here.of_queries(delta).reshape(shape)

        def body(n: jax.Array, carry: tuple) -> tuple:
            d_q, d_key, d_value, d_bias, d_slopes = carry
            tile = Tile(walk, u, i, item(live, n))
            k, v, keep = tile.of_keys(o.key), tile.of_keys(o.value), tile.kept()
            raw, extras = _scores(o, tile, q, k), tile.extras()
            scores, pull = jax.vjp(functools.partial(modified, o), raw, extras)
            seen = jnp.broadcast_to(tile.seen(), scores.shape)
            p = _weights(seen, scores, shifts)
            d_p = _product(o, "hmv,hsv->hms", d_o, v).reshape(p.shape)
            d_p = _dropped(d_p, keep, o.dropout_rate)
            d_raw, d_extras = pull(p * (d_p - deltas[..., None]))
            d_raw = d_raw.reshape(*q.shape[:2], -1).astype(dtype)
            p = _dropped(p, keep, o.dropout_rate).reshape(*q.shape[:2], -1).astype(dtype)
            d_k = _product(o, "hms,hmd->hsd", d_raw, q)
            d_v = _product(o, "hms,hmv->hsv", p, d_o)
            d_q = d_q + _product(o, "hms,hsd->hmd", d_raw, k)
            d_key = add(d_key, tile.to_keys(d_k), tile.at_keys())
            d_value = add(d_value, tile.to_keys(d_v), tile.at_keys())
            if d_bias is not None:
                d_bias = tile.add_bias(d_bias, d_extras.bias)
            if d_slopes is not None:
                d_slopes = tile.add_slopes(d_slopes, d_extras.slopes)
            return d_q, d_key, d_value, d_bias, d_slopes

        d_query, *sums = carry
        start = (jnp.zeros(q.shape, jnp.float32), *sums)
        d_q, *sums = lax.fori_loop(0, count, body, start)
        owned = None if walk.queries.even else walk.queries.owned(i)[None, :, None, None]
        return put(d_query, here.to_queries(d_q), here.at_queries(d_query), owned), *sums

    start = (
        jnp.zeros(o.query.shape, dtype),
        jnp.zeros(o.key.shape, jnp.float32),
        jnp.zeros(o.value.shape, jnp.float32),
        _zeros_like(o.bias, wanted.bias),
        _zeros_like(o.alibi_slopes, wanted.alibi_slopes),
    )
    grads = lax.fori_loop(0, walk.units * walk.queries.count, tiles, start)
    extras = (o.bias if wanted.bias else None, o.alibi_slopes if wanted.alibi_slopes else None)
    like = (o.query, o.key, o.value, *extras)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like)


def _zeros_like(x: jax.Array | None, wanted: bool) -> jax.Array | None:
    return jnp.zeros(x.shape, jnp.float32) if wanted and x is not None else None
