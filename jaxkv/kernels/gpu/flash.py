# SPDX-License-Identifier: Apache-2.0
"""Flash attention for GPUs: a forward and two backward kernels, in Pallas on Triton.

Nothing is transposed or repeated: each program takes a tile of one head out of `[B, T, N, H]`.
Which tiles of keys a tile of queries meets, and the other way round, is a span that the caller
works out; within it every pair is decided by the orders and segments that the kernel loads, so
positions may be anything and may be traced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxkv.core.visibility import Visibility

LOG2E = math.log2(math.e)
# Tensor cores multiply tiles of at least as many rows.
SMALLEST = 16


class Places(NamedTuple):
    """Says where queries and keys stand.

    Attributes:
      q_order: int32 `[B, T]`.
      k_order: int32 `[B, S]`; -1 marks a slot that no query sees, padding included.
      q_segments: int32 `[B, T]`, or `None`.
      k_segments: int32 `[B, S]`, or `None`.
    """

    q_order: jax.Array
    k_order: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None


class Span(NamedTuple):
    """Bounds the tiles that each tile of the other side meets: `[first, end)`, int32 `[B, n]`."""

    first: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about a call.

    Attributes:
      rule: Who sees whom, by order.
      scale: Multiplies the scores.
      soft_cap: Squashes scores into (-cap, cap), or `None`.
      precision: Of the products, as in `jax.lax.dot_general`.
      masked: Whether anything may be hidden from anybody.
      rows: Queries of a tile.
      slots: Keys of a tile.
      warps: Groups of 32 threads of a program.
      stages: Depth of Triton's software pipeline.
      interpret: Run as plain operations, on any platform.
    """

    rule: Visibility
    scale: float
    soft_cap: float | None
    precision: Any
    masked: bool
    rows: int
    slots: int
    warps: int
    stages: int
    interpret: bool

    def parameters(self) -> dict[str, Any]:
        """Gives what `pallas_call` is told of the machine."""
        machine = triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)
        return {"compiler_params": machine, "interpret": self.interpret}

    def dot(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Multiplies two tiles in float32."""
        return triton.dot(x, y, precision=self.precision)

    def scores(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Multiplies queries by keys: scores in units of ln 2, and how flat the soft-cap is."""
        raw = self.dot(q, k.T)
        if self.soft_cap is None:
            return raw * (self.scale * LOG2E), None
        squashed = jnp.tanh(raw * (self.scale / self.soft_cap))
        return squashed * (self.soft_cap * LOG2E), 1.0 - squashed * squashed

    def seen(self, q: tuple, k: tuple) -> jax.Array | None:
        """Applies the rule to the order and segment of a tile's queries and keys."""
        if not self.masked:
            return None
        seen = self.rule.allows(q[0][:, None], k[0][None, :])
        if q[1] is not None:
            seen = seen & (q[1][:, None] == k[1][None, :])
        return seen


def tile(length: int, most: int) -> int:
    """Fits a tile to an axis: a power of two, at least `SMALLEST`.

    >>> tile(3, 128), tile(100, 64), tile(100, 128)
    (16, 64, 128)
    """
    return min(most, max(SMALLEST, pl.next_power_of_2(length)))


def forward(
    c: Call, q: jax.Array, k: jax.Array, v: jax.Array, places: Places, keys: Span
) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Args:
      c: What is static.
      q: `[B, T, N, H]`.
      k: `[B, S, K, H]`, finite even where nothing is stored.
      v: `[B, S, K, V]`, likewise.
      places: Of queries and keys.
      keys: The tiles of keys that each tile of queries meets.

    Returns:
      `(out [B, T, N, V], lse float32 [B, T, N])`; a query that sees nothing has 0 and -inf.
    """
    B, T, N, _ = q.shape
    V, grid = v.shape[3], (pl.cdiv(T, c.rows), N, B)
    specs = _Specs(c, q, k, v, by_query=True)
    out, lse = pl.pallas_call(
        functools.partial(_forward, c, _lengths(q, k, v)),
        grid=grid,
        in_specs=[*specs.inputs(places), specs.bound(), specs.bound()],
        out_specs=[specs.queries(V), specs.line()],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, N, V), v.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        name="flash_forward",
        **c.parameters(),
    )(q, k, v, *places, *keys)
    return out, jnp.swapaxes(lse, 1, 2)


def backward(
    c: Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    places: Places,
    keys: Span,
    queries: Span,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients by q, k and v.

    Args:
      c: What is static.
      q: `[B, T, N, H]`.
      k: `[B, S, K, H]`.
      v: `[B, S, K, V]`.
      d_out: `[B, T, N, V]`.
      lse: float32 `[B, T, N]`, finite: anything where a query sees nothing.
      delta: float32 `[B, T, N]`, the sum of `d_out` times the output, less the lse's gradient.
      places: Of queries and keys.
      keys: The tiles of keys that each tile of queries meets.
      queries: The tiles of queries that each tile of keys meets.

    Source: FlashAttention-2 (arXiv:2307.08691), section 3.1, Algorithm 2, as two passes, so that
    no sum depends on the order in which programs end.
    """
    B, T, N, H = q.shape
    S, K, V = v.shape[1:]
    lengths = _lengths(q, k, v)
    lines = jnp.swapaxes(lse * LOG2E, 1, 2), jnp.swapaxes(delta, 1, 2)
    specs = _Specs(c, q, k, v, by_query=True)
    d_q = pl.pallas_call(
        functools.partial(_backward_queries, c, lengths),
        grid=(pl.cdiv(T, c.rows), N, B),
        in_specs=[
            *specs.inputs(places),
            *(specs.queries(V), specs.line(), specs.line()),
            *(specs.bound(), specs.bound()),
        ],
        out_specs=specs.queries(H),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="flash_backward_queries",
        **c.parameters(),
    )(q, k, v, *places, d_out, *lines, *keys)
    specs = _Specs(c, q, k, v, by_query=False)
    d_k, d_v = pl.pallas_call(
        functools.partial(_backward_keys, c, lengths),
        grid=(pl.cdiv(S, c.slots), K, B),
        in_specs=[
            *specs.inputs(places),
            *(specs.queries(V), specs.line(), specs.line()),
            *(specs.bound(), specs.bound()),
        ],
        out_specs=[specs.keys(H), specs.keys(V)],
        out_shape=[
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        name="flash_backward_keys",
        **c.parameters(),
    )(q, k, v, *places, d_out, *lines, *queries)
    return d_q, d_k, d_v


class _Lengths(NamedTuple):
    """Real sizes of axes that tiles overhang."""

    T: int
    S: int
    H: int
    V: int
    G: int


def _lengths(q: jax.Array, k: jax.Array, v: jax.Array) -> _Lengths:
    return _Lengths(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[2] // k.shape[2])


class _Specs:
    """What a program of the grid `(tile, head, row)` is handed.

    By query: its tile of queries, and all keys of its head. By key: its tile of keys, and all
    queries of the heads that read it, which then have an axis of G heads.
    """

    def __init__(self, c: Call, q: jax.Array, k: jax.Array, v: jax.Array, by_query: bool):
        self.c, self.by_query = c, by_query
        self.T, self.S = q.shape[1], k.shape[1]
        self.G = q.shape[2] // k.shape[2]
        self.widths = q.shape[3], v.shape[3]

    def queries(self, width: int) -> pl.BlockSpec:
        """Takes of `[B, T, N, width]`."""
        width = max(SMALLEST, pl.next_power_of_2(width))
        if self.by_query:
            return pl.BlockSpec((None, self.c.rows, None, width), lambda i, n, b: (b, i, n, 0))
        rows = pl.cdiv(self.T, self.c.rows) * self.c.rows
        return pl.BlockSpec((None, rows, self.G, width), lambda i, n, b: (b, 0, n, 0))

    def keys(self, width: int) -> pl.BlockSpec:
        """Takes of `[B, S, K, width]`."""
        width, G = max(SMALLEST, pl.next_power_of_2(width)), self.G
        if not self.by_query:
            return pl.BlockSpec((None, self.c.slots, None, width), lambda i, n, b: (b, i, n, 0))
        slots = pl.cdiv(self.S, self.c.slots) * self.c.slots
        return pl.BlockSpec((None, slots, None, width), lambda i, n, b: (b, 0, n // G, 0))

    def line(self) -> pl.BlockSpec:
        """Takes of float32 `[B, N, T]`."""
        if self.by_query:
            return pl.BlockSpec((None, None, self.c.rows), lambda i, n, b: (b, n, i))
        rows = pl.cdiv(self.T, self.c.rows) * self.c.rows
        return pl.BlockSpec((None, self.G, rows), lambda i, n, b: (b, n, 0))

    def bound(self) -> pl.BlockSpec:
        """Takes of int32 `[B, tiles]`."""
        return pl.BlockSpec((None, None), lambda i, n, b: (b, i))

    def inputs(self, places: Places) -> list[pl.BlockSpec | None]:
        """Takes of queries, keys, values and places."""
        H, V = self.widths

        def place(x: jax.Array | None, length: int, size: int, tiled: bool) -> Any:
            if x is None:
                return None
            if tiled:
                return pl.BlockSpec((None, size), lambda i, n, b: (b, i))
            whole = pl.cdiv(length, size) * size
            return pl.BlockSpec((None, whole), lambda i, n, b: (b, 0))

        of_queries = functools.partial(place, length=self.T, size=self.c.rows, tiled=self.by_query)
        of_keys = functools.partial(
            place, length=self.S, size=self.c.slots, tiled=not self.by_query
        )
        return [
            self.queries(H),
            self.keys(H),
            self.keys(V),
            of_queries(places.q_order),
            of_keys(places.k_order),
            of_queries(places.q_segments),
            of_keys(places.k_segments),
        ]


def _load(ref: Any, at: tuple, start: Any, length: int, width: int) -> jax.Array:
    """Takes a tile `[size, width]`, with 0 beyond the array's `length` and `width`."""
    ref = ref.at[(*at, slice(None))]
    mask = _inside(ref.shape, start, length, width)
    return ref[...] if mask is None else triton.load(ref, mask=mask, other=0.0)


def _store(ref: Any, x: jax.Array, start: Any, length: int, width: int) -> None:
    mask = _inside(ref.shape, start, length, width)
    triton.store(ref, x.astype(ref.dtype), mask=mask)


def _inside(shape: tuple, start: Any, length: int, width: int) -> jax.Array | None:
    rows, columns = shape
    inside = None
    if length % rows:
        inside = jnp.broadcast_to((start + jnp.arange(rows) < length)[:, None], shape)
    if width != columns:
        real = jnp.broadcast_to((jnp.arange(columns) < width)[None, :], shape)
        inside = real if inside is None else inside & real
    return inside


def _line(ref: Any, at: tuple, start: Any, length: int, other: float) -> jax.Array:
    """Takes a tile `[size]` of a line, with `other` beyond its `length`."""
    ref = ref.at[at]
    (size,) = ref.shape
    if length % size == 0:
        return ref[...]
    return triton.load(ref, mask=start + jnp.arange(size) < length, other=other)


def _place(c: Call, order: Any, segment: Any, at: tuple, start: Any, length: int) -> tuple:
    """Takes the order and segment of a tile; beyond the array nothing is stored."""
    if not c.masked:
        return None, None
    return _line(order, at, start, length, -1), (
        None if segment is None else _line(segment, at, start, length, 0)
    )


def _weights_and_gradient(
    c: Call,
    tiles: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    lse: jax.Array,
    delta: jax.Array,
    seen: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes a tile's weights anew, and the gradient by its products, of q, k, v and d_out."""
    q, k, v, d_out = tiles
    scores, flatness = c.scores(q, k)
    p = jnp.exp2(scores - lse[:, None])
    p = p if seen is None else jnp.where(seen, p, 0.0)
    d_scores = p * (c.dot(d_out, v.T) - delta[:, None])
    # Back through the soft-cap.
    return p, d_scores if flatness is None else d_scores * flatness


def _forward(
    c: Call,
    n: _Lengths,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_order: Any,
    k_order: Any,
    q_segment: Any,
    k_segment: Any,
    first: Any,
    end: Any,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    here = pl.program_id(0) * c.rows
    q = _load(q_ref, (slice(None),), here, n.T, n.H)
    q_place = _place(c, q_order, q_segment, (slice(None),), here, n.T)

    def body(j: jax.Array, carry: tuple) -> tuple:
        top, total, acc = carry
        start = j * c.slots
        at = (pl.ds(start, c.slots),)
        scores, _ = c.scores(q, _load(k_ref, at, start, n.S, n.H))
        seen = c.seen(q_place, _place(c, k_order, k_segment, at, start, n.S))
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(scores - shift[:, None])
        old = jnp.exp2(top - shift)
        v = _load(v_ref, at, start, n.S, n.V)
        acc = acc * old[:, None] + c.dot(p.astype(v.dtype), v)
        return new_top, total * old + jnp.sum(p, axis=1), acc

    start = (
        jnp.full((c.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((c.rows,), jnp.float32),
        jnp.zeros(out_ref.shape, jnp.float32),
    )
    top, total, acc = lax.fori_loop(first[...], end[...], body, start)
    none = total == 0.0
    total = jnp.where(none, 1.0, total)
    lse = jnp.where(none, -jnp.inf, (top + jnp.log2(total)) / LOG2E)
    _store(out_ref, acc / total[:, None], here, n.T, n.V)
    mask = None if n.T % c.rows == 0 else here + jnp.arange(c.rows) < n.T
    triton.store(lse_ref, lse, mask=mask)


def _backward_queries(
    c: Call,
    n: _Lengths,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_order: Any,
    k_order: Any,
    q_segment: Any,
    k_segment: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    first: Any,
    end: Any,
    d_q_ref: Any,
) -> None:
    here, whole = pl.program_id(0) * c.rows, (slice(None),)
    q = _load(q_ref, whole, here, n.T, n.H)
    d_out = _load(d_out_ref, whole, here, n.T, n.V)
    lse = _line(lse_ref, whole, here, n.T, 0.0)
    delta = _line(delta_ref, whole, here, n.T, 0.0)
    q_place = _place(c, q_order, q_segment, whole, here, n.T)

    def body(j: jax.Array, d_q: jax.Array) -> jax.Array:
        start = j * c.slots
        at = (pl.ds(start, c.slots),)
        k = _load(k_ref, at, start, n.S, n.H)
        v = _load(v_ref, at, start, n.S, n.V)
        seen = c.seen(q_place, _place(c, k_order, k_segment, at, start, n.S))
        _, d_scores = _weights_and_gradient(c, (q, k, v, d_out), lse, delta, seen)
        return d_q + c.dot(d_scores.astype(k.dtype), k)

    d_q = lax.fori_loop(first[...], end[...], body, jnp.zeros(d_q_ref.shape, jnp.float32))
    _store(d_q_ref, d_q * c.scale, here, n.T, n.H)


def _backward_keys(
    c: Call,
    n: _Lengths,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_order: Any,
    k_order: Any,
    q_segment: Any,
    k_segment: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    first: Any,
    end: Any,
    d_k_ref: Any,
    d_v_ref: Any,
) -> None:
    here, whole = pl.program_id(0) * c.slots, (slice(None),)
    k = _load(k_ref, whole, here, n.S, n.H)
    v = _load(v_ref, whole, here, n.S, n.V)
    k_place = _place(c, k_order, k_segment, whole, here, n.S)
    low, high = first[...], end[...]

    def of_head(g: jax.Array, carry: tuple) -> tuple:
        def body(i: jax.Array, carry: tuple) -> tuple:
            d_k, d_v = carry
            start = i * c.rows
            at = (pl.ds(start, c.rows),)
            q = _load(q_ref, (*at, g), start, n.T, n.H)
            d_out = _load(d_out_ref, (*at, g), start, n.T, n.V)
            lse, delta = (_line(x, (g, *at), start, n.T, 0.0) for x in (lse_ref, delta_ref))
            seen = c.seen(_place(c, q_order, q_segment, at, start, n.T), k_place)
            p, d_scores = _weights_and_gradient(c, (q, k, v, d_out), lse, delta, seen)
            d_v = d_v + c.dot(p.astype(d_out.dtype).T, d_out)
            return d_k + c.dot(d_scores.astype(q.dtype).T, q), d_v

        return lax.fori_loop(low, high, body, carry)

    start = (jnp.zeros(d_k_ref.shape, jnp.float32), jnp.zeros(d_v_ref.shape, jnp.float32))
    d_k, d_v = lax.fori_loop(0, n.G, of_head, start)
    _store(d_k_ref, d_k * c.scale, here, n.S, n.H)
    _store(d_v_ref, d_v, here, n.S, n.V)
