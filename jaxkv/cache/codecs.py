# SPDX-License-Identifier: Apache-2.0
"""How a record is stored: the codec protocol and the raw dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import lone_row_doubled, pad_width

Planes = dict[str, jax.Array]
# Channels of one tile on TPU.
TILE_LANES = 128
# Bits of one lane of a tile: 8 rows of 32 bits, 16 of 16, and so on.
TILE_BITS = 8 * 32
# Integers of which several lie in a byte where there are no lanes, and how many.
NARROW = {jnp.dtype(jnp.int4): 2, jnp.dtype(jnp.int2): 4}


@dataclasses.dataclass(frozen=True)
class Plane:
    """One stored array `[E, heads, S, *trailing]`; tokens are always axis 2.

    `width` is how many of the last axis's channels carry data; the rest is lane padding. With a
    `stride`, one entry of the token axis serves that many tokens. `code` is the dtype of what is
    stored, where `dtype` only holds its bits.
    """

    heads: int
    trailing: tuple[int, ...]
    dtype: DTypeLike
    width: int
    stride: int = 1
    code: DTypeLike | None = None


class Codec(Protocol):
    """Stores records and reads them back; a frozen, hashable dataclass. One file each."""

    def resolve(self, dtype: DTypeLike) -> Codec:
        """Fills in the module's compute dtype where the codec leaves its own open."""
        ...

    def planes(self, spec: KVSpec, lanes: int) -> dict[str, Plane]:
        """Names the arrays that hold a record."""
        ...

    def encode(self, spec: KVSpec, key: jax.Array, value: jax.Array | None) -> Planes:
        """Encodes new records: key `[B, T, K, H + shared]`, value `[B, T, K, V]` or None."""
        ...

    def decode(self, spec: KVSpec, planes: Planes) -> tuple[jax.Array, jax.Array]:
        """Gives back key `[B, T, K, H + shared]` and value `[B, T, K, V]` of a few tokens."""
        ...

    def scores(self, spec: KVSpec, query: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Multiplies query `[K, M, H + shared]` by a block's keys: float32 `[K, M, Z]`."""
        ...

    def mix(self, spec: KVSpec, weights: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Sums a block's values by weights `[K, M, Z]`: float32 `[K, M, V]`."""
        ...


def bits_of(dtype: DTypeLike) -> int:
    """Counts the bits of a number, 4 or 2 of the narrowest."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return dtype.itemsize * 8


def stored_plane(heads: int, width: int, dtype: DTypeLike, lanes: int) -> Plane:
    """Chooses the array that holds codes of `width` channels.

    XLA's CPU backend widens 8-bit floats and narrower integers whenever it moves them, and with
    them the whole cache. So 8-bit floats are kept as their bits, and 4-bit and 2-bit integers two
    and four to a byte where planes need no lanes. With lanes (on TPU) 4-bit integers have their
    native dtype, which holds those of 2 bits too.
    """
    dtype = jnp.dtype(dtype)
    if dtype in NARROW and lanes == 1:
        width = -(-width // NARROW[dtype])
        return Plane(heads, (width,), jnp.uint8, width, code=dtype)
    holder = dtype
    if dtype == jnp.int2:
        holder = jnp.dtype(jnp.int4)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
        holder = jnp.dtype(jnp.uint8)
    return Plane(heads, (-(-width // lanes) * lanes,), holder, width, code=dtype)


def restored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Gives codes another dtype that holds the same bits.

    Of the 2 (or 4) integers in a byte the lowest is channel i, the next one channel i + width / 2
    (or / 4), and so on.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype in NARROW and dtype in NARROW:
        return x.astype(dtype)
    if x.dtype in NARROW:
        return _packed(x)
    if dtype in NARROW:
        return _unpacked(x, dtype)
    return lax.bitcast_convert_type(x, dtype)


def _packed(x: jax.Array) -> jax.Array:
    number = NARROW[x.dtype]
    bits, width = 8 // number, -(-x.shape[-1] // number)
    x = pad_width(x.astype(jnp.int8), number * width)
    out = jnp.zeros((*x.shape[:-1], width), jnp.uint8)
    for i in range(number):
        part = lax.bitwise_and(x[..., i * width : (i + 1) * width], jnp.int8(2**bits - 1))
        out |= lax.convert_element_type(part, jnp.uint8) << jnp.uint8(i * bits)
    return out


def _unpacked(x: jax.Array, dtype: Any) -> jax.Array:
    number = NARROW[dtype]
    bits, signed = 8 // number, lax.bitcast_convert_type(x, jnp.int8)
    parts = [
        lax.shift_right_arithmetic(
            lax.shift_left(signed, jnp.int8(8 - (i + 1) * bits)), jnp.int8(8 - bits)
        )
        for i in range(number)
    ]
    return jnp.concatenate(parts, axis=-1).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Raw:
    """Stores records as they are, in one float dtype.

    Args:
      dtype: Storage dtype; `None` is the module's compute dtype.

    Raises:
      ValueError: If `dtype` is no float dtype.
    """

    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            if not jnp.issubdtype(self.dtype, jnp.floating):
                raise ValueError(f"Raw({self.dtype}): want a float dtype.")
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def resolve(self, dtype: DTypeLike) -> Raw:
        """Fills in the compute dtype where none was chosen."""
        return self if self.dtype is not None else Raw(dtype)

    def planes(self, spec: KVSpec, lanes: int) -> dict[str, Plane]:
        """Names the arrays: `key`, `value` if it stands apart, `shared` if there is one."""
        if self.dtype is None:
            raise ValueError("Raw() has no dtype yet: pass Raw(dtype), or let a module make it.")

        def plane(heads: int, width: int) -> Plane:
            return stored_plane(heads, width, self.dtype or jnp.float32, lanes)

        planes = {"key": plane(spec.kv_heads, spec.key_width)}
        if spec.value_offset is None:
            planes["value"] = plane(spec.kv_heads, spec.value_width)
        if spec.shared_width:
            planes["shared"] = plane(1, spec.shared_width)
        return planes

    def encode(self, spec: KVSpec, key: jax.Array, value: jax.Array | None) -> Planes:
        """Casts and moves heads before tokens: planes `[B, heads, T, width]`."""
        out = {"key": key[..., : spec.key_width]}
        if spec.value_offset is None:
            if value is None:
                raise ValueError(f"{spec} stores the value apart: pass one.")
            out["value"] = value
        if spec.shared_width:
            out["shared"] = key[:, :, :1, spec.key_width :]
        return {name: x.astype(self.dtype).swapaxes(1, 2) for name, x in out.items()}

    def decode(self, spec: KVSpec, planes: Planes) -> tuple[jax.Array, jax.Array]:
        """Moves tokens before heads and joins what was stored apart."""
        planes = self._coded(planes)
        key = planes["key"][..., : spec.key_width].swapaxes(1, 2)
        value = _value(spec, planes).swapaxes(1, 2)
        if spec.shared_width:
            shared = planes["shared"][..., : spec.shared_width].swapaxes(1, 2)
            shared = jnp.broadcast_to(shared, key.shape[:3] + shared.shape[3:])
            key = jnp.concatenate([key, shared], axis=-1)
        return key, value

    def scores(self, spec: KVSpec, query: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Multiplies query `[K, M, H + shared]` by a block's keys: float32 `[K, M, Z]`."""
        block = self._coded(block)
        out = block_product("kmh,kzh->kmz", query[..., : spec.key_width], block["key"], precision)
        if spec.shared_width:
            shared = block["shared"]
            shared = jnp.broadcast_to(shared, (query.shape[0], *shared.shape[1:]))
            out += block_product("kmh,kzh->kmz", query[..., spec.key_width :], shared, precision)
        return out

    def mix(self, spec: KVSpec, weights: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Sums a block's values by weights `[K, M, Z]`: float32 `[K, M, V]`."""
        plane = self._coded(block)["key" if spec.value_offset is not None else "value"]
        first = spec.value_offset or 0
        last = first + spec.value_width
        begin, end = whole_tiles(first, last, plane.shape[-1])
        out = block_product("kmz,kzv->kmv", weights, plane[..., begin:end], precision)
        return cut_result(out, first - begin, last - begin)

    def _coded(self, planes: Planes) -> Planes:
        dtype = self.dtype if self.dtype is not None else jnp.float32
        return {name: restored(x, dtype) for name, x in planes.items()}


def whole_tiles(first: int, last: int, width: int) -> tuple[int, int]:
    """Widens channels `first .. last - 1` of `width` to whole tiles of a TPU.

    XLA lays out anything narrower with slots as lanes, and to get there it transposes the whole
    cache; what is too much is cut from the result (`cut_result`).
    """
    begin = first // TILE_LANES * TILE_LANES
    return begin, min(-(-last // TILE_LANES) * TILE_LANES, width)


def cut_result(x: jax.Array, first: int, last: int) -> jax.Array:
    """Cuts channels from a product; the barrier keeps their layout from reaching the product."""
    if (first, last) == (0, x.shape[-1]):
        return x
    return lax.optimization_barrier(x)[..., first:last]


def over_heads(block: jax.Array, heads: int) -> jax.Array:
    """Repeats what heads share: `[1|K, Z, width]` to `[K, Z, width]`."""
    return jnp.broadcast_to(block, (heads, *block.shape[1:]))


def _value(spec: KVSpec, planes: Planes) -> jax.Array:
    if spec.value_offset is None:
        return planes["value"][..., : spec.value_width]
    return planes["key"][..., spec.value_offset : spec.value_offset + spec.value_width]


def block_product(
    expr: str, left: jax.Array, right: jax.Array, precision: Any, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies `[K, M, *]` by a block `[K, Z, *]`, summing in float32.

    Args:
      expr: "kmh,kzh->kmz" or "kmz,kzv->kmv".
      left: Queries or weights.
      right: The block, whose channels may be more than the query's.
      precision: As in `jax.lax.dot_general`.
      dtype: Both are multiplied in it; default the wider of both.

    Returns:
      float32.
    """
    rows = left.shape[1]
    if dtype is None:
        dtype = left.dtype if left.dtype == right.dtype else jnp.dtype(jnp.float32)
    left = lone_row_doubled(left.astype(dtype), 1)
    if expr.startswith("kmh"):
        left = pad_width(left, right.shape[-1])
    out = jnp.einsum(
        expr, left, right.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )
    return out[:, :rows]
