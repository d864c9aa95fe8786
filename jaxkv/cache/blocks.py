# SPDX-License-Identifier: Apache-2.0
"""The blocks of one row and its heads, and what the row's queries see of them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import Ends, Index
from jaxkv.cache.reading import Reading, Tile
from jaxkv.cache.write import add_window, tile_rows, window_of
from jaxkv.core.indexing import item, items, put_stretch, quotient, remainder, stretch
from jaxkv.ops.operands import Extras, distances


@dataclasses.dataclass
class Unit:
    """One row and `tile.heads` of its KV heads: what one run of the read loop covers.

    Units are numbered row by row, and by head within a row.
    """

    how: Reading
    tile: Tile
    planes: Planes
    index: Index
    q_order: jax.Array
    mask: jax.Array | None
    number: jax.Array

    @property
    def row(self) -> jax.Array:
        """The row's number, int32."""
        return quotient(self.number, self._units())

    def span(self) -> tuple[jax.Array, jax.Array]:
        """Bounds the row's live blocks that its queries may see."""
        order = item(self.q_order, self.row)
        reach = self.how.rule.reach(order[0], order[-1])
        layout, tile = self.how.layout, self.tile
        first, end = layout.span(self._index(), self.row, tile.slots, tile.size, reach)
        return first, jnp.maximum(end, first)

    def block(self, j: jax.Array) -> tuple[Planes, jax.Array]:
        """Slices block j and zeroes what is not filled: `[heads, Z, ...]`, order int32 `[Z]`."""
        runs, strides = self._runs(j), self.how.strides
        order = _joined([order for _, _, order in runs], 0)

        def emptied(x: jax.Array, stride: int) -> jax.Array:
            heads, size = self._heads(x.shape[1]), self.tile.run // stride
            places = [
                (e, self._aligned(x, quotient(slot, stride), size, stride)) for e, slot, _ in runs
            ]
            window = _joined([_to_multiply(x, e, slot, size, heads)[0] for e, slot in places], 1)
            filled = (order[::stride] >= 0).reshape((1, -1) + (1,) * (window.ndim - 2))
            return jnp.where(filled, window, jnp.zeros((), window.dtype))

        return {name: emptied(x, strides[name]) for name, x in self.planes.items()}, order

    def seen(self, order: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Says which keys of a block each query row sees: bool `[heads|1, M, Z]`."""
        seen = self.how.rule.allows(item(self.q_order, self.row)[:, None], order[None])
        seen = jnp.broadcast_to(seen[None, None], (1, 1, *seen.shape))
        if self.mask is not None:
            seen = seen & self._columns(self.mask, order)
        return _per_query(seen, shape)

    def extras(
        self,
        bias: jax.Array | None,
        slopes: jax.Array | None,
        order: jax.Array,
        shape: tuple[int, ...],
    ) -> Extras:
        """Picks what is added to a block's scores `[heads, M, Z]`: float32, some axes once."""
        distance = None
        if bias is not None:
            bias = _per_query(self._columns(bias, order).astype(jnp.float32), shape)
        if slopes is not None:
            first, count = self._heads(slopes.shape[0])
            own = stretch(slopes.astype(jnp.float32), first, count)
            slopes = _per_query(own[None, :, None, None], shape)
            distance = distances(item(self.q_order, self.row), order)
            distance = _per_query(distance[None, None], shape)
        return Extras(bias, slopes, distance)

    def add(self, j: jax.Array, grads: Planes, *parts: Planes) -> Planes:
        """Adds gradients of block j to those of the planes."""
        runs, out, strides = self._runs(j), dict(grads), self.how.strides
        for name, total in grads.items():
            wide = (part[name].astype(jnp.float32) for part in parts)
            window = functools.reduce(jnp.add, wide)[None].astype(total.dtype)
            head, _ = self._heads(total.shape[1])
            size = self.tile.run // strides[name]
            for number, (entry, slot, _) in enumerate(runs):
                run = window[:, :, number * size : (number + 1) * size]
                total = add_window(total, run, entry, quotient(slot, strides[name]), head)
            out[name] = total
        return out

    def add_slots(self, total: jax.Array, x: jax.Array, j: jax.Array) -> jax.Array:
        """Adds `x [heads, Z]` of block j to the slots `[heads, S]` of the row's entry."""
        ((_, slot, _),) = self._runs(j)
        old = stretch(total, slot, self.tile.size, 1)
        return put_stretch(total, old + x, slot, 1)

    def add_bias(
        self, total: jax.Array | None, grad: jax.Array | None, order: jax.Array
    ) -> jax.Array | None:
        """Adds the gradient `[heads|1, M, Z]` of a block's bias to that of the whole bias."""
        if total is None or grad is None:
            return None
        grad = grad.reshape(-1, self.q_order.shape[1], grad.shape[-1])  # [N, T, Z]
        for axis in (0, 1):
            if total.shape[axis + 1] == 1:
                grad = jnp.sum(grad, axis=axis, keepdims=True)
        first, count = self._heads(total.shape[1])
        head = first + jnp.arange(count, dtype=jnp.int32)[:, None]
        column = jnp.where(order >= 0, order, total.shape[-1])[None]
        place = total.at[self._row_of(total), head, :, column]
        return place.add(grad.swapaxes(1, 2), mode="drop")

    def add_slopes(self, total: jax.Array | None, grad: jax.Array | None) -> jax.Array | None:
        """Adds the gradient `[heads|1, M, 1]` of this unit's slopes to that of all, `[N]`."""
        if total is None or grad is None:
            return None
        first, count = self._heads(total.shape[0])
        old = stretch(total, first, count)
        new = jnp.sum(grad.reshape(count, -1), axis=1)
        return put_stretch(total, old + new, first)

    def _runs(self, j: jax.Array) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Finds block j, whose slots lie in one entry or are several whole ones."""
        layout, tile = self.how.layout, self.tile
        index, count = self._index(), tile.size // tile.run
        return [
            layout.locate(index, self.row, self._ends(), tile.run, j * count + number)
            for number in range(count)
        ]

    def _aligned(self, x: jax.Array, slot: jax.Array, size: int, stride: int) -> jax.Array:
        """Gives a block's first slot so that a compiler sees that it begins a tile, if it does.

        A block begins at a multiple of its size, or ends its entry.
        """
        rows = tile_rows(x)
        if size % rows or (self._ends().held // stride) % rows:
            return slot
        return quotient(slot, rows) * rows

    def _ends(self) -> Ends:
        slots = self.tile.slots
        return Ends(slots, self.how.held if self.how.layout.reads_padding else slots)

    def _index(self) -> Index:
        return self.how.layout.at_head(self.index, remainder(self.number, self._units()))

    def _heads(self, have: int) -> tuple[jax.Array, int]:
        """Tells this unit's first one and number of `have` heads; a single one is shared."""
        units = self._units()
        if have == 1:
            return jnp.zeros_like(self.number), 1
        return remainder(self.number, units) * (have // units), have // units

    def _units(self) -> int:
        """Counts the units of a row."""
        return self.tile.kv_heads // self.tile.heads

    def _row_of(self, x: jax.Array) -> jax.Array:
        return self.row if x.shape[0] > 1 else jnp.zeros_like(self.row)

    def _columns(self, x: jax.Array, order: jax.Array) -> jax.Array:
        first, count = self._heads(x.shape[1])
        row = stretch(stretch(x, self._row_of(x), 1), first, count, 1)
        return items(row, jnp.clip(order, 0, x.shape[3] - 1), axis=3)


def _to_multiply(
    x: jax.Array, entry: jax.Array, slot: jax.Array, width: int, heads: tuple[jax.Array, int]
) -> jax.Array:
    """Slices a window as `window_of`, in the form that a product may read without a copy.

    A whole entry is a run of rows, and is taken as one that may begin anywhere: the slot is 0, but
    XLA does not see it, since the layout rounds it down and the index may count from the end. Where
    it sees that a slice takes whole tiles, it lays out the whole pool anew for the product of a
    tpu7x, and slices that. What is also written must not be sliced so: two views of a plane, one
    read and one put, are a copy.
    """
    count = heads[1]
    if (count, width) != x.shape[1:3] or x.ndim != 4:
        return window_of(x, entry, slot, width, heads)
    rows = x.reshape(-1, x.shape[3])
    run = lax.dynamic_slice_in_dim(rows, entry * (count * width) + slot, count * width)
    return run.reshape(1, *x.shape[1:])


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _per_query(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Lays `[1, N|1, T|1, Z]` out as query rows `[heads|1, M, Z]`, `shape[:2]` = (heads, M)."""
    heads, M = shape[:2]
    _, N, T, Z = x.shape
    if N > 1:
        per_head = M * heads // N  # T of the queries
        return jnp.broadcast_to(x[0], (N, per_head, Z)).reshape(heads, M, Z)
    if T == 1:
        return jnp.broadcast_to(x[0], (1, M, Z))
    return jnp.tile(x[0], (1, M // T, 1))
