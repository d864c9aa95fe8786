# SPDX-License-Identifier: Apache-2.0
"""Moving what a cache holds to another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache.codecs import Planes
from jaxkv.cache.evicting import Evicting
from jaxkv.cache.index import UNBOUNDED, Index, Layout, index_axes
from jaxkv.cache.pairs import check_pair
from jaxkv.cache.plans import Group
from jaxkv.cache.records import Records, create_records
from jaxkv.core.sharding import axis_size, local


class Move(NamedTuple):
    """Where a group moves: its new layout, and the capacity in tokens, default as before."""

    layout: Layout
    capacity: int | None = None


class Relaid(NamedTuple):
    """Groups of layers that were stored in other layouts.

    Attributes:
      layouts: Of the new groups.
      indices: Theirs.
      layers: The records of every layer that was in a group.
      groups: The new group of each of these.
      lost: bool `[B]`, rows that a layout cannot keep; the caller has to empty them in all groups.
    """

    layouts: tuple[Layout, ...]
    indices: tuple[Index, ...]
    layers: dict[int, Records]
    groups: dict[int, int]
    lost: jax.Array


def relaid(
    groups: Sequence[Group],
    layers: Sequence[dict[int, Records]],
    want: Callable[[Group], Move | None],
) -> Relaid:
    """Stores the tokens of groups in other layouts.

    Args:
      groups: The old layouts and indices.
      layers: The records of each group's layers, by the layer's number.
      want: Where a group moves; `None`: it stays as it is.

    Raises:
      ValueError: As `_relaid` does.
    """
    made: list[tuple[Layout, Index]] = []
    moved: dict[int, Records] = {}
    number: dict[int, int] = {}
    lost = jnp.zeros_like(groups[0].index.refused)
    for group, mine in zip(groups, layers, strict=True):
        move = want(group)
        # Layers that keep different tokens part company.
        apart = move is not None and move.layout.per_layer
        for part in [[i] for i in mine] if apart else [list(mine)]:
            layout, index, records = group.layout, group.index, [mine[i] for i in part]
            if move is not None:
                layout = move.layout.fitted(records[0].spec)
                index, records, gone = _relaid(group, records, layout, move.capacity)
                lost |= gone
            moved |= zip(part, records, strict=True)
            number |= dict.fromkeys(part, len(made))
            made.append((layout, index))
    layouts, indices = zip(*made, strict=True)
    return Relaid(layouts, indices, moved, number, lost)


def leaving_holes(group: Group) -> Move | None:
    """Says where a group has to move so that tokens can be given up: to `Evicting`, or nowhere.

    It has as many slots as the row may hold tokens, or as a layout keeps that forgets the others.
    """
    layout, index, slots, _ = group
    if layout.leaves_holes:
        return None
    limit = layout.limit(index, slots)
    limit = slots if limit == UNBOUNDED else limit
    return Move(Evicting(limit, layout.forgetting(slots)), limit)


def _relaid(
    group: Group, layers: Sequence[Records], layout: Layout, capacity: int | None
) -> tuple[Index, list[Records], jax.Array]:
    """Stores the tokens of a group of layers in another layout, each device those of its rows.

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
        keep different tokens, or if devices that split the rows cannot have as much of it each.
    """
    for records in layers:
        check_pair(layout, records.codec)
    if group.layout.per_head:
        raise ValueError(f"{group.layout}: its heads keep different tokens, {layout} the same.")
    old = group.index
    limit = group.layout.limit(old, group.slots)
    if capacity is None and limit == UNBOUNDED:
        raise ValueError(f"{group.layout} has no capacity of its own: pass one for {layout}.")
    capacity = limit if capacity is None else capacity
    _check_shares(layout, old.lengths.shape[0], capacity)

    def moved(old: Index, planes: list[Planes]) -> tuple[Index, list[Planes], jax.Array]:
        index, source, lost = _sources(group, old, layout, capacity)
        new = [_moved(r, x, source) for r, x in zip(layers, planes, strict=True)]
        return index, new, lost

    planes = [r.axes() for r in layers]
    axes = index_axes(group.layout, None), planes
    index, new, lost = local(moved, axes, (index_axes(layout, None), planes, ("batch",)))(
        old, [r.planes for r in layers]
    )
    slots = layout.storage(old.lengths.shape[0], capacity)[1]
    kept = zip(layers, new, strict=True)
    return index, [dataclasses.replace(r, planes=x, slots=slots) for r, x in kept], lost


def _check_shares(layout: Layout, batch: int, capacity: int) -> None:
    devices = axis_size("batch")
    entries = layout.storage(batch, capacity)[0]
    share = layout.storage(batch // devices, capacity)[0]
    if batch % devices == 0 and share * devices != entries:
        raise ValueError(
            f"{layout} of {entries} entries in all, on a mesh that splits rows over {devices} "
            "devices: want a layout of as many as its rows need."
        )


class Source(NamedTuple):
    """Where the slots of new records come from.

    Attributes:
      rows: int32 `[E, S]`, the old entry.
      columns: int32 `[E, S]`, its slot.
      filled: bool `[E, S]`, whether any token comes there.
    """

    rows: jax.Array
    columns: jax.Array
    filled: jax.Array


def _sources(
    group: Group, old: Index, layout: Layout, capacity: int
) -> tuple[Index, Source, jax.Array]:
    """Makes the new index, finds where each of its slots comes from, and the rows lost."""
    batch = old.lengths.shape[0]
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
    # Nothing comes from an entry past the end.
    there = jnp.where(found & ~lost[:, None], new_entry, entries)
    taken = (jnp.take_along_axis(x, at, axis=1) for x in (entry, slot))
    rows, columns = (
        jnp.zeros((entries, slots), jnp.int32).at[there, new_slot].set(x, mode="drop")
        for x in taken
    )
    filled = jnp.zeros((entries, slots), jnp.bool_).at[there, new_slot].set(True, mode="drop")
    return index, Source(rows, columns, filled), lost


def _find(order: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds orders `wanted [B, S']` among `order [B, S]`: whether, and in which column."""
    columns = jnp.argsort(order, axis=1)
    ordered = jnp.take_along_axis(order, columns, axis=1)
    place = jax.vmap(jnp.searchsorted)(ordered, wanted)
    place = jnp.minimum(place, order.shape[1] - 1)
    found = (jnp.take_along_axis(ordered, place, axis=1) == wanted) & (wanted >= 0)
    return found, jnp.take_along_axis(columns, place, axis=1)


def _moved(records: Records, planes: Planes, source: Source) -> Planes:
    """Gathers new planes from those of `records`, of which a device may have some heads only."""
    entries, slots = source.filled.shape
    shapes = create_records(
        records.spec, records.codec, entries, slots, records.lanes, jax.ShapeDtypeStruct, rows=0
    )
    strides = {n: p.stride for n, p in records.codec.planes(records.spec, 1).items()}

    def taken(name: str, x: jax.Array) -> jax.Array:
        # Groups of tokens lie side by side, and begin at a multiple of their size.
        stride = strides[name]
        there = source.columns[:, ::stride] // stride
        picked = jnp.moveaxis(x, 2, 1)[source.rows[:, ::stride], there]  # [E, S, heads, ...]
        mask = source.filled[:, ::stride]
        mask = mask.reshape(mask.shape + (1,) * (picked.ndim - 2))
        picked = jnp.where(mask, picked, jnp.zeros((), x.dtype))
        into = jnp.zeros((entries, x.shape[1], *shapes.planes[name].shape[2:]), x.dtype)
        return into.at[:, :, : picked.shape[1]].set(jnp.moveaxis(picked, 1, 2))

    return {n: taken(n, x) for n, x in planes.items()}
