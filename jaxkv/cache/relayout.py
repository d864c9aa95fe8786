# SPDX-License-Identifier: Apache-2.0
"""Moving what a cache holds to another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import UNBOUNDED, Index, Layout
from jaxkv.cache.pairs import check_pair
from jaxkv.cache.plans import Group
from jaxkv.cache.records import Records, create_records
from jaxkv.core.sharding import axis_size


def relaid(
    group: Group, layers: Sequence[Records], layout: Layout, capacity: int | None
) -> tuple[Index, list[Records], jax.Array]:
    """Stores the tokens of a group of layers in another layout.

    Args:
      group: The old layout and index.
      layers: The group's records.
      layout: The new one.
      capacity: Of the new one, in tokens; default that of the old one.

    Returns:
      The new index and records, and which rows are lost, bool `[B]`: one of which the new layout
      would keep a token that is there no more, or does not fit. The caller has to empty those.

    Raises:
      ValueError: If a capacity is needed and not given, a codec does not fit the layout, if heads
        keep different tokens, or on a
        mesh that splits rows.
    """
    for records in layers:
        check_pair(layout, records.codec)
    if axis_size("batch") > 1:
        raise ValueError("a layout cannot be changed on a mesh that splits rows over devices.")
    if group.layout.per_head:
        raise ValueError(f"{group.layout}: its heads keep different tokens, {layout} the same.")
    old = group.index
    batch = old.lengths.shape[0]
    limit = group.layout.limit(old, group.slots)
    if capacity is None and limit == UNBOUNDED:
        raise ValueError(f"{group.layout} has no capacity of its own: pass one for {layout}.")
    capacity = limit if capacity is None else capacity
    entry, slot, order = group.layout.places(old, group.slots)
    entries, slots = layout.storage(batch, capacity)
    empty = layout.create(batch, capacity)
    index = layout.adopted(empty, slots, order, old.lengths)
    new_entry, new_slot, wanted = layout.places(index, slots)
    found, at = _find(order, wanted)
    lost = jnp.any((wanted >= 0) & ~found, axis=1) | (index.lengths < old.lengths)
    # The residual of exact tokens, if there is one, stays as it is: so does its mark.
    index = dataclasses.replace(
        index, overflowed=old.overflowed, refused=old.refused, high=old.high
    )
    # Where each slot of the new records comes from; nothing comes from an entry past the end.
    source = (jnp.take_along_axis(x, at, axis=1) for x in (entry, slot))
    there = jnp.where(found & ~lost[:, None], new_entry, entries)
    rows, columns = (
        jnp.zeros((entries, slots), jnp.int32).at[there, new_slot].set(x, mode="drop")
        for x in source
    )
    filled = jnp.zeros((entries, slots), jnp.bool_).at[there, new_slot].set(True, mode="drop")
    return index, [_moved(r, entries, slots, rows, columns, filled) for r in layers], lost


def _find(order: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds orders `wanted [B, S']` among `order [B, S]`: whether, and in which column."""
    columns = jnp.argsort(order, axis=1)
    ordered = jnp.take_along_axis(order, columns, axis=1)
    place = jax.vmap(jnp.searchsorted)(ordered, wanted)
    place = jnp.minimum(place, order.shape[1] - 1)
    found = (jnp.take_along_axis(ordered, place, axis=1) == wanted) & (wanted >= 0)
    return found, jnp.take_along_axis(columns, place, axis=1)


def _moved(
    old: Records,
    entries: int,
    slots: int,
    rows: jax.Array,
    columns: jax.Array,
    filled: jax.Array,
) -> Records:
    new = create_records(old.spec, old.codec, entries, slots, old.lanes, rows=0)

    def taken(x: jax.Array, into: jax.Array, stride: int) -> jax.Array:
        # Groups of tokens lie side by side, and begin at a multiple of their size.
        there = columns[:, ::stride] // stride
        picked = jnp.moveaxis(x, 2, 1)[rows[:, ::stride], there]  # [E, S, heads, ...]
        mask = filled[:, ::stride]
        mask = mask.reshape(mask.shape + (1,) * (picked.ndim - 2))
        picked = jnp.where(mask, picked, jnp.zeros((), x.dtype))
        return into.at[:, :, : picked.shape[1]].set(jnp.moveaxis(picked, 1, 2))

    strides = {n: p.stride for n, p in old.codec.planes(old.spec, 1).items()}
    planes: Planes = {n: taken(x, new.planes[n], strides[n]) for n, x in old.planes.items()}
    return dataclasses.replace(new, planes=planes, rest=old.rest)
