# SPDX-License-Identifier: Apache-2.0
"""The walk through the tiles of one attention call, and what lies in each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.core.indexing import quotient, remainder
from jaxkv.core.visibility import visible
from jaxkv.ops.dropping import kept
from jaxkv.ops.operands import Extras, Operands, distances
from jaxkv.ops.tiles import Cut, Live, add, live_tiles, part

# On CPU the tiles of one KV head, its scores among them, stay in the core's own cache. A device
# wants few large products; its tiles of scores, in elements, are bounded by the last number.
CPU_TILE = (128, 128)
DEVICE_TILE = (512, 512)
DEVICE_SCORES = 2**21


@dataclasses.dataclass(frozen=True)
class Walk:
    """Goes through the tiles of a call: `units` times `queries.count` times the live key tiles.

    A unit is one row and `heads` of its KV heads; it is taken whole before the next.
    """

    o: Operands
    queries: Cut
    keys: Cut
    heads: int
    live: Live

    @classmethod
    def of(cls, o: Operands, cpu: bool, rows: int | None, slots: int | None) -> Walk:
        """Chooses the tiles of a platform, but for a size that is given."""
        T, K, S, G = o.query.shape[1], o.key.shape[2], o.key.shape[1], o.groups
        default = CPU_TILE if cpu else DEVICE_TILE
        queries = Cut(T, min(T, max(1, (rows or default[0]) // G)))
        keys = Cut(S, min(S, slots or default[1]))
        heads = 1
        if not cpu:
            most = DEVICE_SCORES // (queries.size * G * keys.size)
            heads = max(n for n in range(1, K + 1) if K % n == 0 and n <= max(1, most))
        return cls(o, queries, keys, heads, live_tiles(o, queries, keys, heads * G))

    @property
    def units(self) -> int:
        """Counts the units."""
        return self.o.key.shape[0] * (self.o.key.shape[2] // self.heads)

    @property
    def width(self) -> int:
        """Counts the query heads of a unit."""
        return self.heads * self.o.groups

    def unit(self, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds a unit's row and first KV head."""
        units = self.o.key.shape[2] // self.heads
        return quotient(u, units), remainder(u, units) * self.heads

    def span(self, u: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the live key tiles of a query tile: int32 `[nk]`, and how many are live."""
        b, h = self.unit(u)
        nk = self.live.tiles.shape[-1]
        at = (b, quotient(h, self.heads), i)
        tiles = part(self.live.tiles, (*at, 0), (1, 1, 1, nk))
        count = part(self.live.count, at, (1, 1, 1))
        return tiles.reshape(nk), count.reshape(())


@dataclasses.dataclass(frozen=True)
class Tile:
    """One pair of tiles. Rows of queries are `[heads, q, G]`, flat `[heads, q G]`."""

    walk: Walk
    u: jax.Array
    i: jax.Array
    j: jax.Array

    def at_queries(self, x: jax.Array) -> tuple:
        """Finds the box of `[B, T, N, *]` that the query tile is."""
        b, h = self.walk.unit(self.u)
        return (b, self.walk.queries.start(self.i), h * self.walk.o.groups, *([0] * (x.ndim - 3)))

    def at_keys(self) -> tuple:
        """Finds the box of `[B, S, K, *]` that the key tile is."""
        b, h = self.walk.unit(self.u)
        return b, self.walk.keys.start(self.j), h, 0

    def of_queries(self, x: jax.Array) -> jax.Array:
        """Takes `[B, T, N, *]` as `[heads, q G, *]`."""
        w = self.walk
        size, G = w.queries.size, w.o.groups
        x = part(x, self.at_queries(x), (1, size, w.width, *x.shape[3:]))
        x = x.reshape(size, w.heads, G, *x.shape[3:])
        return jnp.moveaxis(x, 1, 0).reshape(w.heads, size * G, *x.shape[3:])

    def to_queries(self, x: jax.Array) -> jax.Array:
        """Turns `[heads, q G, *]` into the box `[1, q, N, *]`."""
        w = self.walk
        size, G = w.queries.size, w.o.groups
        x = jnp.moveaxis(x.reshape(w.heads, size, G, *x.shape[2:]), 0, 1)
        return x.reshape(1, size, w.width, *x.shape[3:])

    def of_keys(self, x: jax.Array) -> jax.Array:
        """Takes `[B, S, K, *]` as `[heads, s, *]`, with 0 where nothing is stored."""
        w = self.walk
        x = part(x, self.at_keys(), (1, w.keys.size, w.heads, x.shape[3]))[0]
        filled = self._filled()
        if filled is not None:
            x = jnp.where(filled[:, None, None], x, jnp.zeros((), x.dtype))
        return jnp.moveaxis(x, 1, 0)

    def to_keys(self, x: jax.Array) -> jax.Array:
        """Turns `[heads, s, *]` into the box `[1, s, heads, *]`."""
        return jnp.moveaxis(x, 0, 1)[None]

    def query(self) -> jax.Array:
        """Takes the queries, with 0 for padding."""
        o, q = self.walk.o, self.of_queries(self.walk.o.query)
        if o.q_segments is None:
            return q
        real = jnp.repeat(self._line(o.q_segments, True)[0] != 0, o.groups)
        return jnp.where(real[None, :, None], q, jnp.zeros((), q.dtype))

    def seen(self) -> jax.Array:
        """Applies the visibility rule: bool `[heads|1, q, G|1, s]`."""
        w, o = self.walk, self.walk.o
        q_segments = None if o.q_segments is None else self._line(o.q_segments, True)
        k_segments = None if o.k_segments is None else self._line(o.k_segments, False)
        mask = None if o.mask is None else part(o.mask, *self._scores_box())
        q_order, k_order = self._line(o.q_order, True), self._line(o.k_order, False)
        seen = visible(o.rule, q_order, k_order, q_segments, k_segments, mask)
        if not w.queries.even:
            seen = seen & w.queries.owned(self.i)[None, None, :, None]
        if not w.keys.even:
            seen = seen & w.keys.owned(self.j)[None, None, None]
        return self._by_head(seen)

    def extras(self) -> Extras:
        """Takes what is added to scores `[heads, q, G, s]`."""
        w, o = self.walk, self.walk.o
        bias = slopes = distance = None
        if o.bias is not None:
            bias = self._by_head(part(o.bias, *self._scores_box()))
        if o.alibi_slopes is not None:
            slopes = part(o.alibi_slopes, *self._heads_box()).reshape(w.heads, 1, o.groups, 1)
            distance = distances(self._line(o.q_order, True), self._line(o.k_order, False))
            distance = distance[:, :, None]
        return Extras(bias, slopes, distance)

    def add_bias(self, total: jax.Array, new: jax.Array) -> jax.Array:
        """Adds the gradient of a tile's bias to that of the caller's."""
        box = jnp.swapaxes(new, 1, 2)
        box = box.reshape(1, box.shape[0] * box.shape[1], *box.shape[2:])
        return add(total, box, self._scores_box()[0])

    def add_slopes(self, total: jax.Array, new: jax.Array) -> jax.Array:
        """Adds the gradient of a tile's slopes to that of the caller's."""
        return add(total, new.reshape(-1), self._heads_box()[0])

    def kept(self) -> jax.Array | None:
        """Decides which weights dropout keeps: bool `[heads, q, G, s]`."""
        w, o = self.walk, self.walk.o
        if o.dropout_seeds is None:
            return None
        b, h = w.unit(self.u)
        seeds = part(o.dropout_seeds, (b, h * o.groups, 0), (1, w.width, 2))[0]
        queries = w.queries.start(self.i) + jnp.arange(w.queries.size)
        keys = w.keys.start(self.j) + jnp.arange(w.keys.size)
        return self._by_head(kept(seeds, queries, keys, o.dropout_rate)[None])

    def _filled(self) -> jax.Array | None:
        o = self.walk.o
        filled = None if o.all_filled else self._line(o.k_order, False)[0] >= 0
        if o.k_segments is not None:
            real = self._line(o.k_segments, False)[0] != 0
            filled = real if filled is None else filled & real
        return filled

    def _line(self, x: jax.Array, queries: bool) -> jax.Array:
        """Takes a tile of `[B|1, T]` or `[B|1, S]` as `[1, size]`."""
        cut, i = (self.walk.queries, self.i) if queries else (self.walk.keys, self.j)
        return part(x, (self.walk.unit(self.u)[0], cut.start(i)), (1, cut.size))

    def _scores_box(self) -> tuple[tuple, tuple]:
        """Finds the box of `[B|1, N|1, T|1, S]` that the tile is: starts and sizes."""
        w = self.walk
        b, h = w.unit(self.u)
        starts = (b, h * w.o.groups, w.queries.start(self.i), w.keys.start(self.j))
        return starts, (1, w.width, w.queries.size, w.keys.size)

    def _heads_box(self) -> tuple[tuple, tuple]:
        """Finds the unit's heads of `[N]`: start and size."""
        _, h = self.walk.unit(self.u)
        return (h * self.walk.o.groups,), (self.walk.width,)

    def _by_head(self, x: jax.Array) -> jax.Array:
        """Turns `[1, N|1, q|1, s]` into `[heads|1, q|1, G|1, s]`."""
        w = self.walk
        heads, G = (w.heads, w.o.groups) if x.shape[1] > 1 else (1, 1)
        return jnp.swapaxes(x.reshape(heads, G, *x.shape[2:]), 1, 2)
