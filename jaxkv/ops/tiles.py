# SPDX-License-Identifier: Apache-2.0
"""How queries and keys are cut into tiles, and which pairs of tiles have anything to see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.core.indexing import box, put_box
from jaxkv.ops.operands import Operands

NOWHERE = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Cut:
    """Cuts an axis of `length` tokens into tiles of `size`; `size` is at most `length`.

    The last tile ends where the axis ends, so it may start inside the tile before it: tokens that
    it does not own are hidden there.
    """

    length: int
    size: int

    @property
    def count(self) -> int:
        """Counts the tiles."""
        return -(-self.length // self.size)

    @property
    def even(self) -> bool:
        """Says whether no two tiles share a token."""
        return self.length % self.size == 0

    def start(self, i: jax.Array) -> jax.Array:
        """Finds the first token of a tile."""
        return jnp.minimum(i * self.size, self.length - self.size)

    def owned(self, i: jax.Array) -> jax.Array:
        """Says which tokens of a tile are its own: bool `[size]`."""
        return self.start(i) + jnp.arange(self.size) >= i * self.size

    def tiled(self, x: jax.Array, axis: int, fill: int | bool) -> jax.Array:
        """Splits an axis into `[count, size]` of owned tokens, with `fill` behind the last."""
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, self.count * self.size - self.length, 0)
        x = lax.pad(x, jnp.asarray(fill, x.dtype), pad)
        return x.reshape(*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :])


class Live(NamedTuple):
    """Lists the key tiles that each query tile meets.

    Attributes:
      tiles: int32 `[B|1, N|1, nq, nk]`, the live key tiles first, ascending.
      count: int32 `[B|1, N|1, nq]`, how many are live.
    """

    tiles: jax.Array
    count: jax.Array


def live_tiles(o: Operands, queries: Cut, keys: Cut, heads: int) -> Live:
    """Lists the pairs of `live_pairs`."""
    live = live_pairs(o, queries, keys, heads)
    tiles = jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32)
    return Live(tiles, jnp.sum(live, axis=-1, dtype=jnp.int32))


def live_pairs(o: Operands, queries: Cut, keys: Cut, heads: int) -> jax.Array:
    """Finds the pairs of tiles in which any query may see any key.

    Args:
      o: The call.
      queries: The cut of the queries.
      keys: The cut of the keys.
      heads: Query heads that one step takes together.

    Orders and segments are compared by their ranges in a tile, so a pair that is left out has
    nothing to see; a pair that is listed is masked element by element. A caller's mask is looked
    at once, whole.

    Returns:
      bool `[B|1, N|1, nq, nk]`.
    """
    q_real = jnp.ones_like(o.q_order, bool) if o.q_segments is None else o.q_segments != 0
    k_real = o.k_order >= 0
    if o.k_segments is not None:
        k_real = k_real & (o.k_segments != 0)
    q_low, q_high = _range(queries, o.q_order, q_real)
    k_low, k_high = _range(keys, o.k_order, k_real)
    live = (k_low <= k_high)[:, None, :] & (q_low <= q_high)[:, :, None]
    live &= o.rule.meets(
        q_low[:, :, None], q_high[:, :, None], k_low[:, None, :], k_high[:, None, :]
    )
    if o.q_segments is not None and o.k_segments is not None:
        q_low, q_high = _range(queries, o.q_segments, q_real)
        k_low, k_high = _range(keys, o.k_segments, k_real)
        live &= (q_low[:, :, None] <= k_high[:, None, :]) & (
            k_low[:, None, :] <= q_high[:, :, None]
        )
    live = live[:, None]
    if o.mask is not None:
        live = live & _any(o.mask, queries, keys, heads)
    return live


def _range(cut: Cut, x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds the values of each tile: int32 `[B|1, count]` twice, low > high where none is real."""
    low = jnp.min(cut.tiled(jnp.where(real, x, NOWHERE), 1, NOWHERE), axis=-1)
    high = jnp.max(cut.tiled(jnp.where(real, x, -1), 1, -1), axis=-1)
    return low, high


def _any(mask: jax.Array, queries: Cut, keys: Cut, heads: int) -> jax.Array:
    """Says in which pairs of tiles a mask keeps anything: `[B|1, N/heads|1, nq|1, nk]`."""
    mask = jnp.any(keys.tiled(mask, 3, False), axis=-1)
    if mask.shape[2] > 1:
        mask = jnp.any(queries.tiled(mask, 2, False), axis=3)
    if mask.shape[1] > 1:
        B, N, nq, nk = mask.shape
        mask = jnp.any(mask.reshape(B, N // heads, heads, nq, nk), axis=2)
    return mask


def part(x: jax.Array, starts: Sequence[jax.Array | int], sizes: Sequence[int]) -> jax.Array:
    """Takes a box out of an array whose axes of size 1 stand for any size."""
    return box(x, _starts(x, starts), [min(n, s) for n, s in zip(x.shape, sizes, strict=True)])


def put(
    x: jax.Array, new: jax.Array, starts: Sequence[jax.Array | int], owned: jax.Array | None
) -> jax.Array:
    """Writes a box, but for what it does not own (`owned` broadcasts against `new`)."""
    new = new.astype(x.dtype)
    if owned is not None:
        new = jnp.where(owned, new, part(x, starts, new.shape))
    return put_box(x, new, _starts(x, starts))


def add(x: jax.Array, new: jax.Array, starts: Sequence[jax.Array | int]) -> jax.Array:
    """Adds a box, summed over the axes that `x` has only once."""
    axes = tuple(a for a, (n, m) in enumerate(zip(x.shape, new.shape, strict=True)) if n == 1 < m)
    new = jnp.sum(new, axis=axes, keepdims=True) if axes else new
    old = part(x, starts, new.shape)
    return put_box(x, old + new.astype(x.dtype), _starts(x, starts))


def _starts(x: jax.Array, starts: Sequence[jax.Array | int]) -> list[jax.Array | int]:
    return [
        0 if n == 1 else jnp.asarray(s, jnp.int32) for n, s in zip(x.shape, starts, strict=True)
    ]
