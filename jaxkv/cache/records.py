# SPDX-License-Identifier: Apache-2.0
"""The stored arrays of one layer, and their exact size."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import TILE_BITS, TILE_LANES, Codec, Plane, Planes, bits_of, restored
from jaxkv.cache.grouped import Grouped, tokens_together
from jaxkv.cache.index import Moves, take_rows
from jaxkv.cache.spec import KVSpec
from jaxkv.core.indexing import item, items, put_stretch, stretch
from jaxkv.core.numerics import pad_width
from jaxkv.core.sharding import local
from jaxkv.core.trees import static

PLANE_AXES = ("batch", "kv_heads", "slots", "head_dim")
SHARED_AXES = ("batch", None, "slots", "head_dim")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    """What one layer stores.

    Attributes:
      planes: name -> array `[E, heads, S, ...]`; with lanes, S is padded to whole tiles too.
      spec: The shape of a record.
      codec: How it is stored.
      lanes: The minor width of every plane is a multiple of this (128 on TPU).
      slots: S without padding, the slots of one entry.
      rest: The newest tokens as they are, name -> array `[B, heads, slots, ...]`, of a codec that
        encodes whole groups of tokens; else none.
    """

    planes: Planes
    spec: KVSpec = static()
    codec: Codec = static()
    lanes: int = static()
    slots: int = static()
    rest: Planes = dataclasses.field(default_factory=dict)

    @property
    def whole_slots(self) -> int:
        """Slots of one entry in whole groups of the tokens that the codec encodes together."""
        group = tokens_together(self.codec)
        return -(-self.slots // group) * group

    @property
    def held_slots(self) -> int:
        """Slots of one entry with the padding that every plane has."""
        strides = {n: p.stride for n, p in self.codec.planes(self.spec, 1).items()}
        return min(x.shape[2] * strides[n] for n, x in self.planes.items())

    def moved(self, moves: Moves, rows: jax.Array | None = None) -> Records:
        """Moves entries as the layout asks for: copies happen in place, one entry at a time.

        With `rows`, row i becomes what row `rows[i]` was: its residual moves along.
        """
        planes, axes = self.planes, self.axes()
        if moves.take is not None:
            planes = {n: take_rows(x, moves.take, axes[n]) for n, x in planes.items()}
        if moves.source is not None and moves.target is not None:
            in_axes = (axes, ("batch",), ("batch",))
            planes = local(_copied, in_axes, axes)(planes, moves.source, moves.target)
        rest, axes = self.rest, self.rest_axes()
        if rows is not None:
            rest = {n: take_rows(x, rows, axes[n]) for n, x in rest.items()}
        return dataclasses.replace(self, planes=planes, rest=rest)

    def rest_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Names the logical axes of every plane of the residual."""
        return {n: plane_axes(x.shape[1], x.ndim) for n, x in self.rest.items()}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Names the logical axes of every plane."""
        return {n: plane_axes(x.shape[1], x.ndim) for n, x in self.planes.items()}


def _copied(planes: Planes, source: jax.Array, target: jax.Array) -> Planes:
    """Copies entries `source` to `target`; those with a target of -1 are left out."""
    live = target >= 0
    first = jnp.argsort(jnp.logical_not(live), stable=True)
    source, target = items(source, first), items(target, first)

    def body(i: jax.Array, planes: Planes) -> Planes:
        return {
            n: put_stretch(x, stretch(x, item(source, i), 1), item(target, i))
            for n, x in planes.items()
        }

    return lax.fori_loop(0, jnp.sum(live.astype(jnp.int32)), body, dict(planes))


def plane_axes(heads: int, ndim: int) -> tuple[str | None, ...]:
    """Names the logical axes of a plane: a single head is not split."""
    return (PLANE_AXES if heads > 1 else SHARED_AXES)[:ndim]


def create_records(
    spec: KVSpec,
    codec: Codec,
    entries: int,
    slots: int,
    lanes: int = 1,
    fill: Callable[..., Any] = jnp.zeros,
    rows: int | None = None,
) -> Records:
    """Allocates the records of one layer, every plane a buffer of its own.

    Args:
      spec: The shape of a record.
      codec: How it is stored, with its dtype known.
      entries: E.
      slots: S, in tokens.
      lanes: Multiple that minor widths are padded to.
      fill: Called as `fill(shape, dtype)`; `jax.ShapeDtypeStruct` counts without allocating.
      rows: B, where that is not E: what a codec keeps of each row beside the entries.

    Returns:
      Empty records.
    """

    def arrays(planes: dict[str, Plane], entries: int, slots: int) -> Planes:
        sizes = _rows(planes, slots, lanes)
        return {
            n: fill((entries, p.heads, sizes[n], *p.trailing), p.dtype) for n, p in planes.items()
        }

    group, rest = tokens_together(codec), {}
    if isinstance(codec, Grouped):
        kept = codec.newest.planes(spec, lanes)
        rest = arrays(kept, entries if rows is None else rows, codec.rest_slots)
    stored = arrays(codec.planes(spec, lanes), entries, -(-slots // group) * group)
    return Records(stored, spec, codec, lanes, slots, rest)


def _rows(planes: dict[str, Plane], slots: int, lanes: int) -> dict[str, int]:
    """Sizes each plane's token axis: slots, padded to whole tiles where there are lanes.

    XLA gives a TPU array whose last two axes are no whole tiles another layout, and copies the
    whole cache into it at every step.
    """
    by_token = [p for p in planes.values() if p.trailing and p.stride == 1]
    most = max(TILE_BITS // bits_of(p.dtype) for p in by_token)

    def size(plane: Plane) -> int:
        step = 1 if lanes == 1 else most if plane.stride == 1 else TILE_BITS // bits_of(plane.dtype)
        return -(-slots // plane.stride // step) * step

    return {n: size(p) for n, p in planes.items()}


def converted(old: Records, codec: Codec | None, lanes: int | None) -> Records:
    """Stores the same tokens in another codec (default: the same) or with other lane padding.

    Of codecs that encode whole groups of tokens, lanes alone; see `recoded` for the rest.
    """
    lanes = old.lanes if lanes is None else lanes
    if lanes < 1:
        raise ValueError(f"lanes={lanes}: want at least 1.")
    new = old.codec if codec is None else codec.resolve(decoded_dtype(old))
    if new == old.codec:
        return _padded(old, lanes)

    def recode(stored: Planes) -> Planes:
        key, value = old.codec.decode(old.spec, stored)
        return new.encode(old.spec, key, None if old.spec.value_offset is not None else value)

    return _stored(old, new, lanes, recode)


def _stored(old: Records, codec: Codec, lanes: int, recode: Callable[[Planes], Planes]) -> Records:
    """Stores what `recode` makes of the planes of `old`, on each device for itself."""
    planes, group = codec.planes(old.spec, lanes), tokens_together(codec)

    def made(stored: Planes) -> Planes:
        return fitted(recode(stored), planes, -(-old.slots // group) * group, lanes)

    out_axes = {n: plane_axes(p.heads, 3 + len(p.trailing)) for n, p in planes.items()}
    found = local(made, (old.axes(),), out_axes)(old.planes)
    return Records(found, old.spec, codec, lanes, old.slots)


def _padded(old: Records, lanes: int) -> Records:
    """Gives the same bits other lane padding: what is stored is never encoded again."""

    def bare(planes: dict[str, Plane], stored: Planes) -> Planes:
        # Lane padding goes before the dtype does: packed integers are parts of a whole.
        cut = {n: x[..., : planes[n].width] if x.ndim > 3 else x for n, x in stored.items()}
        return {n: restored(x, planes[n].code or x.dtype) for n, x in cut.items()}

    out = _stored(
        old, old.codec, lanes, functools.partial(bare, old.codec.planes(old.spec, old.lanes))
    )
    if not isinstance(old.codec, Grouped):
        return out
    codec, there = old.codec, old.codec.newest.planes(old.spec, old.lanes)
    wanted = codec.newest.planes(old.spec, lanes)

    def kept(rest: Planes) -> Planes:
        return fitted(bare(there, rest), wanted, codec.rest_slots, lanes)

    axes = old.rest_axes()
    return dataclasses.replace(out, rest=local(kept, (axes,), axes)(old.rest))


def fitted(coded: Planes, planes: dict[str, Plane], slots: int, lanes: int) -> Planes:
    """Stores codes `[E, heads, S, ...]` in planes of `slots` slots, cut or padded."""
    rows = _rows(planes, slots, lanes)
    return {n: _fitted(x, planes[n], slots // planes[n].stride, rows[n]) for n, x in coded.items()}


def decoded_dtype(records: Records) -> Any:
    """Tells the dtype that records are read back in: of the exact tokens, where there are some."""
    if isinstance(records.codec, Grouped):
        return records.codec.newest.dtype
    decode = functools.partial(records.codec.decode, records.spec)
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in records.planes.items()}
    return jax.eval_shape(decode, shapes)[0].dtype


def _fitted(x: jax.Array, plane: Plane, slots: int, rows: int) -> jax.Array:
    """Stores codes `[E, heads, S, ...]` in a plane's dtype, slots and channels cut or padded."""
    x = restored(x[:, :, :slots], plane.dtype)
    more = [(0, 0), (0, 0), (0, rows - x.shape[2])] + [(0, 0)] * (x.ndim - 3)
    x = jnp.pad(x, more)
    if not plane.trailing:
        return x
    return pad_width(x[..., : plane.width], plane.trailing[-1])


def bytes_per_token(spec: KVSpec, codec: Codec) -> int:
    """Counts the bytes of one token in one layer, as specified, without any padding.

    What a group of tokens shares counts for each by its part, rounded up to whole bytes together;
    a residual of the newest tokens, which does not grow with the row, is left out.

    >>> from jaxkv.cache.codecs import Raw
    >>> 61 * bytes_per_token(KVSpec(1, 576, 512, value_offset=0), Raw(jnp.bfloat16))  # DeepSeek-V3
    70272
    """

    group = tokens_together(codec)

    def of_group(plane: Plane) -> int:
        own = (*plane.trailing[:-1], plane.width) if plane.trailing else ()
        return plane.heads * math.prod(own) * bits_of(plane.dtype) * group // plane.stride

    return -(-sum(of_group(p) for p in codec.planes(spec, 1).values()) // (8 * group))


def leaf_bytes(leaf: Any) -> int:
    """Counts an array's bytes; native int4 holds two numbers a byte."""
    return -(-math.prod(leaf.shape) * bits_of(leaf.dtype) // 8)


def tree_bytes(tree: Any) -> int:
    """Counts the bytes of every array of a tree."""
    return sum(leaf_bytes(x) for x in jax.tree.leaves(tree))


def physical_bytes(leaf: Any, tiled: bool) -> int:
    """Counts the bytes an array takes in device memory.

    On TPU the minor axis is padded to 128 lanes and the one before it to a tile's rows
    (8 for 32-bit, 16 for 16-bit, 32 for 8-bit numbers); elsewhere nothing is padded.
    """
    if not tiled or len(leaf.shape) < 2:
        return leaf_bytes(leaf)
    *lead, rows, lanes = leaf.shape
    bits = bits_of(leaf.dtype)
    step = max(TILE_BITS // bits, 1)
    padded = (-(-rows // step) * step) * (-(-lanes // TILE_LANES) * TILE_LANES)
    return math.prod(lead) * padded * bits // 8
