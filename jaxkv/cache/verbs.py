# SPDX-License-Identifier: Apache-2.0
"""The verbs that every cache has, written once over groups of layers."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxkv.cache.codecs import Codec
from jaxkv.cache.index import Index, Layout, Plan
from jaxkv.cache.records import (
    Records,
    bytes_per_token,
    create_records,
    physical_bytes,
    tree_bytes,
)
from jaxkv.core.positions import compaction
from jaxkv.core.sharding import Rules, local, named
from jaxkv.core.trees import is_known
from jaxkv.ops.api import check_lengths


class Verbs:
    """Operations on a cache's rows; a cache states its parts and how to rebuild itself.

    All verbs that change contents return a new cache, keep every shape, and work under `jit`.
    """

    def _parts(self) -> tuple[tuple[Layout, ...], tuple[Index, ...], tuple[Records, ...], tuple]:
        """Gives layouts and indices (one per group), layers, and each layer's group."""
        raise NotImplementedError

    def _rebuilt(self, indices: tuple[Index, ...], layers: tuple[Records, ...]) -> Self:
        raise NotImplementedError

    @property
    def lengths(self) -> jax.Array:
        """int32 `[B]`, tokens each row has been given and holds."""
        return self._parts()[1][0].lengths

    @property
    def overflowed(self) -> jax.Array:
        """bool `[B]`, tokens of the row were dropped because they did not fit."""
        return _any(tuple(i.overflowed for i in self._parts()[1]))

    @property
    def refused(self) -> jax.Array:
        """bool `[B]`, a rollback of the row went deeper than what is still there."""
        return _any(tuple(i.refused for i in self._parts()[1]))

    @property
    def capacity(self) -> int:
        """Slots that every row has in every layer, in tokens."""
        return min(r.slots for r in self._parts()[2])

    def rollback(self, count: jax.Array) -> Self:
        """Takes back the last tokens of each row.

        Args:
          count: int32 `[B]` (or an int for all rows), in tokens.

        Returns:
          The cache. A row that does not hold `count` tokens any more is left as it is and
          flagged `refused`; nothing is lost.

        Raises:
          ValueError: Outside `jit`, if a row is refused.
        """
        layouts, indices, layers, groups = self._parts()
        count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), indices[0].lengths.shape)
        first = [layers[groups.index(g)].slots for g in range(len(layouts))]
        new = tuple(
            lay.rollback(i, s, count) for lay, i, s in zip(layouts, indices, first, strict=True)
        )
        for before, after in zip(indices, new, strict=True):
            _raise_if(
                after.refused & ~before.refused,
                f"rollback of {count} tokens: rows hold {before.lengths}",
            )
        return self._rebuilt(new, layers)

    def reset(self, rows: jax.Array | None = None) -> Self:
        """Empties rows and clears their flags; `rows` is bool `[B]`, default all."""
        layouts, indices, layers, _ = self._parts()
        if rows is None:
            rows = jnp.ones(indices[0].lengths.shape, jnp.bool_)
        new = tuple(lay.reset(i, rows) for lay, i in zip(layouts, indices, strict=True))
        return self._rebuilt(new, layers)

    def reorder(self, rows: jax.Array) -> Self:
        """Makes row i what row `rows[i]` was (beams): int32 `[B]`."""
        if rows.shape != self.lengths.shape:
            raise ValueError(f"reorder rows {rows.shape}: want {self.lengths.shape}; else fork.")
        return self.fork(rows)

    def fork(self, rows: jax.Array) -> Self:
        """Makes a cache whose row i is a copy of row `rows[i]`: int32, any number of rows."""
        layouts, indices, layers, groups = self._parts()
        moved = [lay.gather(i, rows) for lay, i in zip(layouts, indices, strict=True)]
        new = tuple(
            dataclasses.replace(
                r,
                planes={n: jnp.take(x, moved[g][1], axis=0) for n, x in r.planes.items()},
            )
            for r, g in zip(layers, groups, strict=True)
        )
        return self._rebuilt(tuple(index for index, _ in moved), new)

    def convert(self, *, codec: Codec | None = None, lanes: int | None = None) -> Self:
        """Stores the same tokens in another codec or with other lane padding."""
        _, indices, layers, _ = self._parts()

        def one(old: Records) -> Records:
            new = codec.resolve(jnp.float32) if codec is not None else old.codec
            pad = old.lanes if lanes is None else lanes
            entries = next(iter(old.planes.values())).shape[0]
            key, value = old.codec.decode(old.spec, old.planes)
            planes = new.encode(old.spec, key, value)
            empty = create_records(old.spec, new, entries, old.slots, pad)
            grown = {
                n: jax.lax.dynamic_update_slice(x, planes[n], (0,) * x.ndim)
                for n, x in empty.planes.items()
            }
            return dataclasses.replace(empty, planes=grown)

        return self._rebuilt(indices, tuple(one(r) for r in layers))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token leaves in all layers, as specified, without padding."""
        return sum(bytes_per_token(r.spec, r.codec) for r in self._parts()[2])

    @property
    def nbytes(self) -> int:
        """Bytes of every leaf: what the live arrays add up to."""
        return tree_bytes(self)

    def physical_nbytes(self, chip: str = "cpu") -> int:
        """Bytes in a device's memory; TPUs pad minor axes to tiles of 128 lanes."""
        tiled = chip.startswith(("v4", "v5", "v6", "tpu"))
        return sum(physical_bytes(x, tiled) for x in jax.tree.leaves(self))

    def abstract(self) -> Self:
        """Gives the cache's shapes and dtypes, for `jit(...).lower` and Orbax."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)

    def sharding(self, mesh: Mesh, rules: Rules | None = None) -> Self:
        """Gives each leaf's `NamedSharding`: rows over `batch`, heads over `kv_heads`."""
        rules = rules or Rules()
        _, indices, layers, _ = self._parts()

        def rows(x: Any) -> Any:
            return named(mesh, ("batch", *(None,) * (x.ndim - 1)), x.shape, rules)

        placed = tuple(
            dataclasses.replace(
                r, planes={n: named(mesh, r.axes()[n], x.shape, rules) for n, x in r.planes.items()}
            )
            for r in layers
        )
        return self._rebuilt(jax.tree.map(rows, indices), placed)


def plan_step(
    layout: Layout,
    index: Index,
    slots: int,
    length: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> Plan:
    """Plans the appending of one call's tokens to a group of layers.

    Args:
      layout: Of the group.
      index: Of the group.
      slots: S of the group's entries.
      length: T, tokens of this call with padding.
      lengths: int32 `[B]`, how many of them are real, or `None` for all.
      segment_ids: int32 `[B, T]`, 0 is padding, or `None`; a cached row is one sequence.

    Returns:
      The plan.

    Raises:
      ValueError: If lengths do not fit, or outside `jit` if tokens do not fit the cache.
    """
    batch = index.lengths.shape[0]
    count = jnp.full((batch,), length, jnp.int32)
    order = None
    if lengths is not None:
        check_lengths("lengths", lengths, length, batch)
        count = jnp.clip(lengths.astype(jnp.int32), 0, length)
    if segment_ids is not None:
        if lengths is not None:
            raise ValueError("lengths and segment_ids both mark padding: pass one of them.")
        if segment_ids.shape != (batch, length):
            raise ValueError(f"segment_ids {segment_ids.shape}: want ({batch}, {length}).")
        _check_one_sequence(segment_ids)
        order = compaction(segment_ids)
        count = jnp.sum((segment_ids != 0).astype(jnp.int32), axis=1)

    def plan(index: Index, count: jax.Array, order: jax.Array | None) -> Plan:
        planned = layout.plan(index, slots, length, count)
        return dataclasses.replace(planned, order=order)

    planned = local(plan, (("batch",), ("batch",), ("batch",)), ("batch",))(index, count, order)
    _raise_if(
        planned.after.overflowed & ~index.overflowed,
        f"{count} new tokens do not fit: rows hold {index.lengths} of {slots}",
    )
    return planned


def _check_one_sequence(segment_ids: jax.Array) -> None:
    if not is_known(segment_ids):
        return
    ids = np.asarray(segment_ids)
    for row in ids:
        if np.unique(row[row != 0]).size > 1:
            raise ValueError(
                f"segment_ids {row.tolist()} pack several documents, but a cached row is one "
                "sequence: want one nonzero id in each row."
            )


def _any(flags: tuple[jax.Array, ...]) -> jax.Array:
    out = flags[0]
    for flag in flags[1:]:
        out = out | flag
    return out


def _raise_if(rows: jax.Array, message: str) -> None:
    """Raises where flags are known; under `jit` they stay in the cache for the caller."""
    if is_known(rows) and bool(np.any(np.asarray(rows))):
        raise ValueError(f"{message}; rows {np.flatnonzero(np.asarray(rows)).tolist()}.")
