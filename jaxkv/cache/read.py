# SPDX-License-Identifier: Apache-2.0
"""Attention over the live part of a cache: a loop over blocks, with its own gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache.codecs import Codec, Planes
from jaxkv.cache.index import Index, Layout
from jaxkv.cache.spec import KVSpec
from jaxkv.cache.write import add_window, window_of, zero_cotangent
from jaxkv.core.visibility import Visibility
from jaxkv.ops.operands import capped

# Scores of one block, in elements: keeps scores, keys and values of a block near the core.
BLOCK_SCORES = 2**19
BLOCK_SLOTS = (128, 512)


class BlockView(Protocol):
    """Turns a block into another form before it is attended (MLA: expanded heads)."""

    def spec(self, num_heads: int) -> KVSpec:
        """The record that this form's `num_heads` queries (a device's share) fit."""
        ...

    def apply(self, weights: Any, spec: KVSpec, codec: Codec, block: Planes) -> Planes:
        """Gives the block as planes of `spec`, stored raw, in the dtype of `weights`."""
        ...

    @property
    def codec(self) -> Codec:
        """Reads the planes that `apply` gives."""
        ...

    @property
    def weight_axes(self) -> Any:
        """Names the logical axes of `weights`, as a tree of them."""
        ...


@dataclasses.dataclass(frozen=True)
class Reading:
    """The static choices of one read."""

    spec: KVSpec
    codec: Codec
    layout: Layout
    rule: Visibility
    scale: float
    groups: int  # query heads that share a KV head of the records
    soft_cap: float | None = None
    precision: Any = None
    view: BlockView | None = None

    def read_spec(self, num_heads: int) -> KVSpec:
        """The record that `num_heads` queries, a device's share, fit."""
        if self.view is not None:
            return self.view.spec(num_heads)
        # One KV head serves any share of the query heads; several are shared out alike.
        return dataclasses.replace(self.spec, kv_heads=max(1, num_heads // self.groups))


class Inputs(NamedTuple):
    """The arrays of one read that carry gradients, beside the query and the planes."""

    bias: jax.Array | None  # [B|1, N|1, T|1, S]
    weights: Any  # of the view


def read(
    how: Reading,
    query: jax.Array,
    planes: Planes,
    index: Index,
    q_order: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    weights: Any = None,
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

    Returns:
      `(out float32[B, T, N, V], lse float32[B, T, N])`; 0 and -inf where nothing is seen.

    The number of blocks that are read follows the live lengths, not the allocation. Slots that
    are not filled are emptied block by block, so what stands in them reaches nothing.
    """
    B, T, N, H = query.shape
    spec = how.read_spec(N)
    K, V = spec.kv_heads, spec.value_width
    if B == 0 or T == 0:
        return jnp.zeros((B, T, N, V)), jnp.full((B, T, N), -jnp.inf)
    # [B, K, G*T, H]: all query rows of a KV head in one product.
    rows = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    out, lse = _read(how, rows, planes, Inputs(bias, weights), index, q_order, mask)
    out = out.reshape(B, N, T, -1).swapaxes(1, 2)
    return out, lse.reshape(B, N, T).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(
    how: Reading,
    query: jax.Array,
    planes: Planes,
    inputs: Inputs,
    index: Index,
    q_order: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the forward loop: `([B, K, M, V], [B, K, M])`, float32."""
    size, slots = _tile(how, query, planes)
    V = how.read_spec(query.shape[1]).value_width

    def row_body(_: None, b: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        row = _Row(how, planes, index, q_order, mask, b, size, slots)
        q = query[b]

        def body(j: jax.Array, carry: tuple) -> tuple:
            top, total, acc = carry
            block, order = row.block(j)
            seen = row.seen(order, q.shape)
            scores = _scores(how, q, block, inputs.weights, row.bias(inputs.bias, order, q.shape))
            new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1))
            shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
            p = jnp.where(seen, jnp.exp(jnp.where(seen, scores - shift[..., None], 0.0)), 0.0)
            old = jnp.where(jnp.isfinite(top), jnp.exp(top - shift), 0.0)
            mixed = _mix(how, p.astype(q.dtype), block, inputs.weights)
            total = total * old + jnp.sum(p, axis=-1)
            return new_top, total, acc * old[..., None] + mixed

        empty = jnp.full(q.shape[:2], -jnp.inf)
        start = (empty, jnp.zeros(q.shape[:2]), jnp.zeros((*q.shape[:2], V)))
        top, total, acc = lax.fori_loop(*row.span(), body, start)
        none = total == 0
        total = jnp.where(none, 1.0, total)
        lse = jnp.where(none, -jnp.inf, jnp.where(none, 0.0, top) + jnp.log(total))
        return None, (acc / total[..., None], lse)

    return lax.scan(row_body, None, jnp.arange(query.shape[0], dtype=jnp.int32))[1]


def _forward(
    how: Reading,
    query: jax.Array,
    planes: Planes,
    inputs: Inputs,
    index: Index,
    q_order: jax.Array,
    mask: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    out, lse = _read(how, query, planes, inputs, index, q_order, mask)
    return (out, lse), (query, planes, inputs, index, q_order, mask, out, lse)


def _backward(how: Reading, saved: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple:
    """Runs the same blocks again: the flash-attention gradient (arXiv:2307.08691, 2.3.2)."""
    query, planes, inputs, index, q_order, mask, out, lse = saved
    d_out, d_lse = grads
    seen_any = jnp.isfinite(lse)
    d_lse = jnp.where(seen_any, d_lse, 0.0)
    shift = jnp.where(seen_any, lse, 0.0)
    delta = jnp.sum(d_out * out, axis=-1) - d_lse
    size, slots = _tile(how, query, planes)

    def row_body(carry: tuple, b: jax.Array) -> tuple[tuple, jax.Array]:
        row = _Row(how, planes, index, q_order, mask, b, size, slots)
        q = query[b]

        def body(j: jax.Array, carry: tuple) -> tuple:
            d_q, d_planes, d_inputs = carry
            block, order = row.block(j)
            bias = row.bias(inputs.bias, order, q.shape)
            scores, pull = jax.vjp(functools.partial(_scores, how), q, block, inputs.weights, bias)
            seen = row.seen(order, q.shape)
            p = jnp.where(seen, jnp.exp(jnp.where(seen, scores - shift[b][..., None], 0.0)), 0.0)
            _, pull_mix = jax.vjp(
                functools.partial(_mix, how), p.astype(q.dtype), block, inputs.weights
            )
            d_p, d_block2, d_weights2 = pull_mix(d_out[b])
            d_scores = p * (d_p.astype(jnp.float32) - delta[b][..., None])
            d_q1, d_block, d_weights, d_bias = pull(d_scores)
            d_planes = row.add(j, d_planes, d_block, d_block2)
            d_weights = jax.tree.map(
                lambda a, b, c: a + b.astype(a.dtype) + c.astype(a.dtype),
                d_inputs.weights,
                d_weights,
                d_weights2,
            )
            d_bias = row.add_bias(d_inputs.bias, d_bias, order)
            return d_q + d_q1.astype(jnp.float32), d_planes, Inputs(d_bias, d_weights)

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        d_q, d_planes, d_inputs = lax.fori_loop(*row.span(), body, start)
        return (d_planes, d_inputs), d_q.astype(q.dtype)

    d_planes = {n: jnp.zeros_like(x) for n, x in planes.items() if _floating(x)}
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    rows = jnp.arange(query.shape[0], dtype=jnp.int32)
    (d_planes, d_inputs), d_query = lax.scan(row_body, (d_planes, wide), rows)
    d_inputs = jax.tree.map(lambda g, x: g.astype(x.dtype), d_inputs, inputs)
    d_planes = {n: d_planes[n] if n in d_planes else zero_cotangent(x) for n, x in planes.items()}
    return d_query, d_planes, d_inputs, None, None, None


_read.defvjp(_forward, _backward)


@dataclasses.dataclass
class _Row:
    """One row of a read: finds its blocks, and what its queries see of them."""

    how: Reading
    planes: Planes
    index: Index
    q_order: jax.Array
    mask: jax.Array | None
    b: jax.Array
    size: int
    slots: int

    def span(self) -> tuple[jax.Array, jax.Array]:
        order = self.q_order[self.b]
        reach = self.how.rule.reach(order[0], order[-1])
        first, end = self.how.layout.span(self.index, self.b, self.slots, self.size, reach)
        return first, jnp.maximum(end, first)

    def block(self, j: jax.Array) -> tuple[Planes, jax.Array]:
        entry, slot, order = self._locate(j)

        def emptied(x: jax.Array) -> jax.Array:
            window = window_of(x, entry, slot, self.size)[0]
            filled = (order >= 0).reshape((1, self.size) + (1,) * (window.ndim - 2))
            return jnp.where(filled, window, jnp.zeros((), window.dtype))

        return {name: emptied(x) for name, x in self.planes.items()}, order

    def seen(self, order: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Says which keys of a block each query row sees: bool `[K, M, Z]` (or broadcast)."""
        seen = self.how.rule.allows(self.q_order[self.b][:, None], order[None])
        seen = jnp.broadcast_to(seen[None, None], (1, 1, *seen.shape))
        if self.mask is not None:
            seen = seen & self._columns(self.mask, order)
        return _per_row(seen, shape)

    def bias(
        self, bias: jax.Array | None, order: jax.Array, shape: tuple[int, ...]
    ) -> jax.Array | None:
        """Picks the bias of a block: float32 `[K, M, Z]`."""
        if bias is None:
            return None
        return _per_row(self._columns(bias, order).astype(jnp.float32), shape)

    def add(self, j: jax.Array, grads: Planes, *parts: Planes) -> Planes:
        entry, slot, _ = self._locate(j)
        out = dict(grads)
        for name in grads:
            for part in parts:
                window = part[name][None].astype(grads[name].dtype)
                out[name] = add_window(out[name], window, entry, slot)
        return out

    def add_bias(
        self, total: jax.Array | None, grad: jax.Array | None, order: jax.Array
    ) -> jax.Array | None:
        if total is None or grad is None:
            return None
        T = self.q_order.shape[1]
        grad = grad.reshape(-1, T, grad.shape[-1])[None]  # [1, N, T, Z]
        for axis in (1, 2):
            if total.shape[axis] == 1:
                grad = jnp.sum(grad, axis=axis, keepdims=True)
        row = self.b if total.shape[0] > 1 else jnp.zeros_like(self.b)
        column = jnp.where(order >= 0, order, total.shape[-1])
        return total.at[row, :, :, column].add(jnp.moveaxis(grad[0], -1, 0), mode="drop")

    def _locate(self, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.how.layout.locate(self.index, self.b, self.slots, self.size, j)

    def _columns(self, x: jax.Array, order: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(x, self.b if x.shape[0] > 1 else jnp.zeros_like(self.b), 0)
        return jnp.take(row, jnp.maximum(order, 0), axis=3)


def _scores(
    how: Reading, query: jax.Array, block: Planes, weights: Any, bias: jax.Array | None
) -> jax.Array:
    spec, codec, block = _viewed(how, block, weights, query.shape[0])
    scores = capped(codec.scores(spec, query, block, how.precision) * how.scale, how.soft_cap)
    return scores if bias is None else scores + bias


def _mix(how: Reading, p: jax.Array, block: Planes, weights: Any) -> jax.Array:
    spec, codec, block = _viewed(how, block, weights, p.shape[0])
    return codec.mix(spec, p, block, how.precision)


def _viewed(how: Reading, block: Planes, weights: Any, heads: int) -> tuple[KVSpec, Codec, Planes]:
    if how.view is None:
        return how.spec, how.codec, block
    view = how.view
    return view.spec(heads), view.codec, view.apply(weights, how.spec, how.codec, block)


def _per_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Lays `[1, N|1, T|1, Z]` out as query rows `[K|1, M, Z]`."""
    K, M = shape[:2]
    T = x.shape[2]
    if x.shape[1] == 1:  # all heads alike: [T, Z] repeated for the G heads of each KV head
        x = jnp.broadcast_to(x[0], (1, M, x.shape[3])) if T == 1 else jnp.tile(x[0], (1, M // T, 1))
        return x
    per_head = M * K // x.shape[1]  # T
    x = jnp.broadcast_to(x[0], (x.shape[1], per_head, x.shape[3]))
    return x.reshape(K, M, x.shape[2])


def _tile(how: Reading, query: jax.Array, planes: Planes) -> tuple[int, int]:
    """Chooses the block size, and tells S."""
    slots = next(iter(planes.values())).shape[2]
    low, high = BLOCK_SLOTS
    want = BLOCK_SCORES // (query.shape[1] * query.shape[2])
    want = min(high, max(low, 2 ** int(np.log2(max(want, 1)))))
    return how.layout.tile(slots, want), slots


def _floating(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
