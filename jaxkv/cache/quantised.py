# SPDX-License-Identifier: Apache-2.0
"""Codecs of narrow numbers with a float32 scale for each token, head and channel group."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxkv.cache.codecs import (
    Plane,
    Planes,
    block_product,
    cut_result,
    over_heads,
    restored,
    stored_plane,
    whole_tiles,
)
from jaxkv.cache.spec import KVSpec
from jaxkv.core.trees import check_sizes

Group = tuple[int, int]  # channels [first, last)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Stores `code * scale`, the scale being the largest magnitude of its channels over `largest`.

    A token is encoded by itself, so it does not matter in which call it arrives, and what is
    stored is never encoded again. Scales multiply scores and weights, so a read never makes a
    wide copy of the cache.

    Args:
      group: Channels that share a scale; `None`: a head's whole key, and its whole value. A value
        that lies in the key (MLA) always has scales of its own.

    Raises:
      ValueError: If `group` is below 1.

    Numerics: an error of at most half a step, `largest magnitude / (2 * largest)`, per channel.
    """

    group: int | None = None

    code: ClassVar[DTypeLike]
    largest: ClassVar[float]

    def __post_init__(self) -> None:
        check_sizes(group=self.group)

    def resolve(self, dtype: DTypeLike) -> Scaled:
        """The codes have their own dtype, whatever the compute dtype."""
        del dtype
        return self

    def planes(self, spec: KVSpec, lanes: int) -> dict[str, Plane]:
        """Names the arrays: codes as `Raw` names them, and `key_scale_0` and so on."""
        out = {}
        for name, heads, width in _parts(spec):
            out[name] = stored_plane(heads, width, self.code, lanes)
            for i, _ in enumerate(self._groups(spec, name, width)):
                out[f"{name}_scale_{i}"] = Plane(heads, (), jnp.float32, 1)
        return out

    def encode(self, spec: KVSpec, key: jax.Array, value: jax.Array | None) -> Planes:
        """Encodes each token by itself; a token of zeros stays zeros."""
        given = {"key": key[..., : spec.key_width], "value": value}
        if spec.shared_width:
            given["shared"] = key[:, :, :1, spec.key_width :]
        out: Planes = {}
        for name, _, width in _parts(spec):
            x = given[name]
            if x is None:
                raise ValueError(f"{spec} stores the value apart: pass one.")
            # Infinity would make the other channels zero and itself no number.
            limit = float(jnp.finfo(jnp.float32).max)
            x = jnp.clip(x.astype(jnp.float32), -limit, limit).swapaxes(1, 2)
            codes = []
            for i, (a, b) in enumerate(self._groups(spec, name, width)):
                part = x[..., a:b]
                # Every program has to find the same bits: XLA must not move the constant into
                # what is computed of the scale.
                largest = jnp.max(jnp.abs(part), axis=-1)
                scale = lax.optimization_barrier(largest * jnp.float32(1 / self.largest))
                codes.append(self._coded(part / jnp.where(scale > 0, scale, 1.0)[..., None]))
                out[f"{name}_scale_{i}"] = scale
            out[name] = jnp.concatenate(codes, axis=-1)
        return out

    def decode(self, spec: KVSpec, planes: Planes) -> tuple[jax.Array, jax.Array]:
        """Gives back float32 key `[B, T, K, H + shared]` and value `[B, T, K, V]`."""
        found = {}
        for name, _, width in _parts(spec):
            stored = restored(planes[name], self.code)
            parts = [
                stored[..., a:b].astype(jnp.float32) * planes[f"{name}_scale_{i}"][..., None]
                for i, (a, b) in enumerate(self._groups(spec, name, width))
            ]
            found[name] = jnp.concatenate(parts, axis=-1).swapaxes(1, 2)
        key = found["key"]
        if spec.value_offset is None:
            value = found["value"]
        else:
            value = key[..., spec.value_offset : spec.value_offset + spec.value_width]
        if spec.shared_width:
            shared = jnp.broadcast_to(found["shared"], (*key.shape[:3], spec.shared_width))
            key = jnp.concatenate([key, shared], axis=-1)
        return key, value

    def scores(self, spec: KVSpec, query: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Multiplies query `[K, M, H + shared]` by a block's keys: float32 `[K, M, Z]`."""
        out, first = jnp.zeros(()), 0
        for name, _, width in _parts(spec):
            if name == "value":
                continue
            stored = restored(block[name], self.code)
            for i, (a, b) in enumerate(self._groups(spec, name, width)):
                begin, end = whole_tiles(a, b, stored.shape[-1])
                q = query[..., first + a : first + b]
                q = jnp.pad(q, [(0, 0), (0, 0), (a - begin, end - b)])
                codes = over_heads(stored[..., begin:end], query.shape[0])
                scale = block[f"{name}_scale_{i}"][:, None]
                out = out + block_product("kmh,kzh->kmz", q, codes, precision, q.dtype) * scale
            first += width
        return out

    def mix(self, spec: KVSpec, weights: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Sums a block's values by weights `[K, M, Z]`: float32 `[K, M, V]`."""
        name = "value" if spec.value_offset is None else "key"
        width = spec.value_width if spec.value_offset is None else spec.key_width
        first, stored = spec.value_offset or 0, restored(block[name], self.code)
        parts = []
        for i, (a, b) in enumerate(self._groups(spec, name, width)):
            if not first <= a < first + spec.value_width:
                continue
            scale = block[f"{name}_scale_{i}"][:, None]
            w = (weights.astype(jnp.float32) * scale).astype(weights.dtype)
            begin, end = whole_tiles(a, b, stored.shape[-1])
            codes = stored[..., begin:end]
            mixed = block_product("kmz,kzv->kmv", w, codes, precision, weights.dtype)
            parts.append(cut_result(mixed, a - begin, b - begin))
        return jnp.concatenate(parts, axis=-1)

    def _groups(self, spec: KVSpec, name: str, width: int) -> Iterator[Group]:
        """Cuts a plane's channels: where a value begins and ends, and every `group` channels."""
        cuts = {0, width}
        if name == "key" and spec.value_offset is not None:
            cuts |= {spec.value_offset, spec.value_offset + spec.value_width}
        edges = sorted(cuts)
        for low, high in itertools.pairwise(edges):
            step = self.group or high - low
            yield from ((a, min(a + step, high)) for a in range(low, high, step))

    def _coded(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError


class _Rounded(Scaled):
    def _coded(self, x: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(x), -self.largest, self.largest).astype(self.code)


@dataclasses.dataclass(frozen=True)
class Int8(_Rounded):
    """Stores 8-bit integers in -127 .. 127 with a scale for each token and head.

    >>> codec, spec = Int8(), KVSpec(1, 4, 4)
    >>> x = jnp.array([[[[1.0, -2.0, 0.5, 0.0]]]])
    >>> codec.encode(spec, x, x)["key"].ravel().tolist()
    [64, -127, 32, 0]
    """

    code: ClassVar[DTypeLike] = jnp.int8
    largest: ClassVar[float] = 127.0


@dataclasses.dataclass(frozen=True)
class Int4(_Rounded):
    """Stores 4-bit integers in -7 .. 7, two to a byte, with a scale for each token and head.

    Keys with a channel that is always large spoil the other channels of their group: give such
    models a small `group`, or store them with `Kivi`.
    """

    code: ClassVar[DTypeLike] = jnp.int4
    largest: ClassVar[float] = 7.0


@dataclasses.dataclass(frozen=True)
class Float8(Scaled):
    """Stores 8-bit floats (e4m3) with a scale for each token and head; never NaN, never beyond 448.

    Numerics: a relative error of at most 1 / 16 of each number above 1 / 28,672 of the largest.
    """

    code: ClassVar[DTypeLike] = jnp.float8_e4m3fn
    largest: ClassVar[float] = 448.0

    def _coded(self, x: jax.Array) -> jax.Array:
        # e4m3fn has no infinity: what rounds beyond 448 would be NaN.
        return jnp.clip(x, -self.largest, self.largest).astype(self.code)


def _parts(spec: KVSpec) -> Iterator[tuple[str, int, int]]:
    """Lists the arrays that hold a record: name, heads, width."""
    yield "key", spec.kv_heads, spec.key_width
    if spec.value_offset is None:
        yield "value", spec.kv_heads, spec.value_width
    if spec.shared_width:
        yield "shared", 1, spec.shared_width
