# SPDX-License-Identifier: Apache-2.0
"""Changing codecs, also to and from those that encode whole groups of tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.cache.codecs import Codec, Planes, Raw, restored
from jaxkv.cache.grouped import Grouped, Newest
from jaxkv.cache.index import Index, Layout
from jaxkv.cache.pairs import check_pair
from jaxkv.cache.records import Records, converted, decoded_dtype, fitted, plane_axes
from jaxkv.core.sharding import local


def recoded(
    old: Records, codec: Codec | None, lanes: int | None, layout: Layout, index: Index
) -> Records:
    """Stores the same tokens in another codec (default: the same) or with other lane padding.

    Args:
      old: The records.
      codec: The new codec, of which a codec of whole groups encodes those of each row that are
        a whole group behind, and keeps the others as they are.
      lanes: Default as before.
      layout: Where the tokens are.
      index: Of the rows.

    Returns:
      The records.

    Raises:
      ValueError: If the codec does not fit the layout.
    """
    new = old.codec if codec is None else codec.resolve(decoded_dtype(old))
    if new == old.codec or not (isinstance(old.codec, Grouped) or isinstance(new, Grouped)):
        return converted(old, new, lanes)
    check_pair(layout, new)
    if isinstance(old.codec, Grouped):
        old = dataclasses.replace(_ungrouped(old, old.codec, layout, index), lanes=1)
    if not isinstance(new, Grouped):
        return converted(old, new, lanes)
    return _regrouped(converted(old, new.newest, lanes), new, layout, index)


def _ungrouped(old: Records, codec: Grouped, layout: Layout, index: Index) -> Records:
    """Decodes what is encoded and puts the exact tokens in their places: raw float32."""
    spec, wide = old.spec, Raw(jnp.float32)
    kept = codec.newest.planes(spec, 1)
    sizes = {n: old.whole_slots // p.stride for n, p in codec.planes(spec, 1).items()}

    def decoded(planes: Planes, rest: Planes, index: Index) -> Planes:
        key, value = codec.decode(spec, {n: x[:, :, : sizes[n]] for n, x in planes.items()})
        raw = wide.encode(spec, key, None if spec.value_offset is not None else value)
        slot = jnp.arange(codec.rest_slots, dtype=jnp.int32)[None]
        order = Newest(codec).orders(index.lengths[:, None], slot)
        entry, place = _places(layout, index, old.slots, order)
        entry = jnp.where(order >= 0, entry, old.planes["key"].shape[0])
        exact = {n: restored(x, kept[n].code or x.dtype) for n, x in rest.items()}
        out = {}
        for name, x in raw.items():
            new = exact[name][:, :, : codec.rest_slots, : x.shape[3]].astype(jnp.float32)
            x = x[:, :, : old.slots]
            out[name] = x.at[entry, :, place].set(jnp.moveaxis(new, 2, 1), mode="drop")
        return out

    planes = wide.planes(spec, 1)
    axes = {n: plane_axes(p.heads, 4) for n, p in planes.items()}
    in_axes = (old.axes(), old.rest_axes(), ("batch",))
    found = local(decoded, in_axes, axes)(old.planes, old.rest, index)
    return Records(found, spec, wide, 1, old.slots)


def _regrouped(raw: Records, codec: Grouped, layout: Layout, index: Index) -> Records:
    """Encodes all groups of raw tokens, and keeps the newest ones as they are."""
    spec, lanes = raw.spec, raw.lanes
    out = dataclasses.replace(raw, codec=codec)
    kept, planes = codec.newest.planes(spec, lanes), codec.planes(spec, lanes)

    def encoded(stored: Planes, index: Index) -> tuple[Planes, Planes]:
        bare = {n: x[:, :, : raw.slots, : kept[n].width] for n, x in stored.items()}
        more = [(0, 0), (0, 0), (0, out.whole_slots - raw.slots), (0, 0)]
        key, value = codec.newest.decode(spec, {n: jnp.pad(x, more) for n, x in bare.items()})
        coded = codec.encode(spec, key, None if spec.value_offset is not None else value)
        # The ring as appending leaves it: each slot has the newest token that belongs there.
        slot = jnp.arange(codec.rest_slots, dtype=jnp.int32)[None]
        last = index.lengths[:, None] - 1
        order = last - (last - slot) % codec.rest_slots
        entry, place = _places(layout, index, raw.slots, order)
        there = (order >= 0)[:, None, :, None]
        rest = {n: jnp.moveaxis(x[entry, :, place], 1, 2) for n, x in bare.items()}
        rest = {n: jnp.where(there, x, jnp.zeros((), x.dtype)) for n, x in rest.items()}
        return (
            fitted(coded, planes, out.whole_slots, lanes),
            fitted(rest, kept, codec.rest_slots, lanes),
        )

    axes = {n: plane_axes(p.heads, 3 + len(p.trailing)) for n, p in planes.items()}
    found, rest = local(encoded, (raw.axes(), ("batch",)), (axes, raw.axes()))(raw.planes, index)
    return dataclasses.replace(out, planes=found, rest=rest)


def _places(
    layout: Layout, index: Index, slots: int, order: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds entry and slot of tokens `order int32[B, R]`; any, where there is none."""
    entry, slot, _ = layout.places(index, slots)  # a column for each order
    column = jnp.clip(order, 0, entry.shape[1] - 1)
    entry, slot = (jnp.take_along_axis(x, column, axis=1) for x in (entry, slot))
    return jnp.maximum(entry, 0), slot
