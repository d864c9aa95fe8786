# SPDX-License-Identifier: Apache-2.0
"""KIVI: keys with a scale per channel, values with one per token, the newest tokens exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxkv.cache.codecs import (
    Plane,
    Planes,
    Raw,
    block_product,
    cut_result,
    over_heads,
    restored,
    stored_plane,
    whole_tiles,
)
from jaxkv.cache.grouped import Grouped
from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import pad_width
from jaxkv.core.trees import check_sizes

CODES: dict[int, Any] = {2: jnp.int2, 4: jnp.int4, 8: jnp.int8}


@dataclasses.dataclass(frozen=True)
class Kivi(Grouped):
    """Stores `code * scale + zero`: keys by channel over a group of tokens, values by token.

    Key channels differ in size far more than tokens do, so a key's scale and zero point are those
    of one channel over `group` tokens; a value that lies in the key (MLA) and channels that heads
    share are stored likewise. A value of its own has a scale and zero point for each token.

    The newest tokens are kept as they are: a group is encoded once it is a whole group behind, so
    a row has `group` to `2 * group - 1` exact tokens (or all, if fewer). What is encoded is a
    function of the tokens alone, however they arrive, and is never encoded again. A call attends
    to its own tokens exactly, as the paper's prefill does; so a token that is one call's own in
    one run, and an earlier call's in another, is seen exactly in one and through its code in the
    other: outputs agree within the bound below.

    A rollback is exact as far as the residual goes, at least `group` tokens; beyond, it is
    refused. Fits contiguous rows, and pages of whole groups.

    Args:
      bits: 2, 4 or 8 of each code. With lanes (TPU) those of 2 bits take 4.
      group: Q, tokens that share a key channel's scale.
      value_group: Channels that share a value's scale; `None`: a head's whole value.
      dtype: Of the newest tokens; `None` is the module's compute dtype.

    Raises:
      ValueError: If a number does not fit, or `dtype` is no float dtype.

    Numerics: an error of at most half a step, `(largest - smallest) / (2 * (2**bits - 1))` of the
    channel in its group, or of the token's value channels. Numbers beyond half of float32's
    largest are cut to it; a NaN makes its channel NaN for all tokens of the group. No gradient
    reaches a token that was encoded; the newest tokens have theirs.

    Source: Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    (arXiv:2402.02750), section 3.

    >>> codec, spec = Kivi(bits=2, group=4, dtype=jnp.float32), KVSpec(1, 1, 1)
    >>> x = jnp.array([50.0, 51.0, 52.0, 53.0]).reshape(1, 4, 1, 1)
    >>> codec.decode(spec, codec.encode(spec, x, x))[0].ravel().tolist()
    [50.0, 51.0, 52.0, 53.0]
    """

    bits: int = 4
    group: int = 32
    value_group: int | None = None
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        check_sizes(group=self.group, value_group=self.value_group)
        if self.bits not in CODES:
            raise ValueError(f"bits={self.bits}: want one of {', '.join(map(str, CODES))}.")
        object.__setattr__(self, "dtype", Raw(self.dtype).dtype)

    @property
    def _code(self) -> Any:
        return CODES[self.bits]

    def resolve(self, dtype: DTypeLike) -> Kivi:
        """Fills in the compute dtype for the newest tokens where none was chosen."""
        if self.dtype is not None:
            return self
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def planes(self, spec: KVSpec, lanes: int) -> dict[str, Plane]:
        """Names the arrays: codes as `Raw` names them, each with its `_scale` and `_zero`."""
        out = {}
        for name, heads, width in _by_channel(spec):
            out[name] = stored_plane(heads, width, self._code, lanes)
            padded = -(-width // lanes) * lanes
            for part in ("scale", "zero"):
                plane = Plane(heads, (padded,), jnp.float32, width, self.group)
                out[f"{name}_{part}"] = plane
        if spec.value_offset is None:
            heads = spec.kv_heads
            out["value"] = stored_plane(heads, spec.value_width, self._code, lanes)
            for i, _ in enumerate(self._value_groups(spec)):
                for part in ("scale", "zero"):
                    out[f"value_{part}_{i}"] = Plane(heads, (), jnp.float32, 1)
        return out

    def encode(self, spec: KVSpec, key: jax.Array, value: jax.Array | None) -> Planes:
        """Encodes whole groups: key `[B, T, K, H + shared]`, value `[B, T, K, V]` or None."""
        B, T = key.shape[:2]
        given = {"key": key[..., : spec.key_width], "shared": key[:, :, :1, spec.key_width :]}
        out: Planes = {}
        for name, _, width in _by_channel(spec):
            heads = given[name].shape[2]  # a device's share
            x = _finite(given[name]).reshape(B, T // self.group, self.group, heads, width)
            codes, scale, zero = self._quantised(x.transpose(0, 3, 1, 2, 4), 3)
            out[name] = codes.reshape(B, heads, T, width)
            out[f"{name}_scale"], out[f"{name}_zero"] = scale[:, :, :, 0], zero[:, :, :, 0]
        if spec.value_offset is None:
            if value is None:
                raise ValueError(f"{spec} stores the value apart: pass one.")
            x, codes = _finite(value).swapaxes(1, 2), []
            for i, (a, b) in enumerate(self._value_groups(spec)):
                code, scale, zero = self._quantised(x[..., a:b], 3)
                codes.append(code)
                out[f"value_scale_{i}"], out[f"value_zero_{i}"] = scale[..., 0], zero[..., 0]
            out["value"] = jnp.concatenate(codes, axis=-1)
        return out

    def _quantised(self, x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Encodes float32 numbers with one scale and zero point along an axis."""
        low, high = (reduce(x, axis=axis, keepdims=True) for reduce in (jnp.min, jnp.max))
        # Every program has to find the same bits: XLA must not move the constant into what is
        # computed of the scale.
        scale = lax.optimization_barrier((high - low) * jnp.float32(1 / (2**self.bits - 1)))
        half = 2 ** (self.bits - 1)
        steps = jnp.round((x - low) / jnp.where(scale > 0, scale, 1.0))
        codes = jnp.clip(steps, 0, 2 * half - 1) - half
        # A power of two times a scale is exact, so that fusing the sum into it changes no bit.
        return codes.astype(self._code), scale, low + half * scale

    def decode(self, spec: KVSpec, planes: Planes) -> tuple[jax.Array, jax.Array]:
        """Gives back float32 key `[B, T, K, H + shared]` and value `[B, T, K, V]`."""
        found = {}
        for name, _, width in _by_channel(spec):
            codes = restored(planes[name], self._code)[..., :width].astype(jnp.float32)
            scale, zero = (self._spread(planes[f"{name}_{p}"], codes) for p in ("scale", "zero"))
            found[name] = (codes * scale + zero).swapaxes(1, 2)
        key = found["key"]
        if spec.value_offset is None:
            codes = restored(planes["value"], self._code)
            parts = []
            for i, (a, b) in enumerate(self._value_groups(spec)):
                scale, zero = (planes[f"value_{p}_{i}"][..., None] for p in ("scale", "zero"))
                parts.append(codes[..., a:b].astype(jnp.float32) * scale + zero)
            value = jnp.concatenate(parts, axis=-1).swapaxes(1, 2)
        else:
            value = key[..., spec.value_offset : spec.value_offset + spec.value_width]
        if spec.shared_width:
            shared = jnp.broadcast_to(found["shared"], (*key.shape[:3], spec.shared_width))
            key = jnp.concatenate([key, shared], axis=-1)
        return key, value

    def _spread(self, x: jax.Array, codes: jax.Array) -> jax.Array:
        """Repeats `[B, heads, T / Q, *]` for each token of `codes [B, heads, T, width]`."""
        return jnp.repeat(x[..., : codes.shape[-1]], self.group, axis=2)[:, :, : codes.shape[2]]

    def scores(self, spec: KVSpec, query: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Multiplies query `[K, M, H + shared]` by a block's keys: float32 `[K, M, Z]`."""
        K, M = query.shape[:2]
        out, first = jnp.zeros(()), 0
        for name, _, width in _by_channel(spec):
            codes = over_heads(restored(block[name], self._code), K)
            W = codes.shape[-1]
            scale, zero = (over_heads(block[f"{name}_{p}"], K) for p in ("scale", "zero"))
            scale, zero = (pad_width(x[..., :W], W) for x in (scale, zero))
            q = pad_width(query[..., first : first + width].astype(jnp.float32), W)
            # [K Z/Q, M, W]: each group of tokens has a query of its own, with its scales in it.
            scaled = (q[:, None] * scale[:, :, None]).astype(query.dtype).reshape(-1, M, W)
            codes = codes.reshape(-1, self.group, W)
            part = block_product("kmh,kzh->kmz", scaled, codes, precision, query.dtype)
            part = part.reshape(K, -1, M, self.group).swapaxes(1, 2)
            # A zero point may be far larger than a step, so it has to be whole.
            base = block_product("kmh,kzh->kmz", q, zero, lax.Precision.HIGHEST, jnp.float32)
            out = out + (part + base[..., None]).reshape(K, M, -1)
            first += width
        return out

    def mix(self, spec: KVSpec, weights: jax.Array, block: Planes, precision: Any) -> jax.Array:
        """Sums a block's values by weights `[K, M, Z]`: float32 `[K, M, V]`."""
        if spec.value_offset is not None:
            return self._mixed_keys(spec, weights, block, precision)
        stored, parts = restored(block["value"], self._code), []
        wide = weights.astype(jnp.float32)
        for i, (a, b) in enumerate(self._value_groups(spec)):
            scale, zero = (block[f"value_{p}_{i}"][:, None] for p in ("scale", "zero"))
            begin, end = whole_tiles(a, b, stored.shape[-1])
            codes, w = stored[..., begin:end], (wide * scale).astype(weights.dtype)
            mixed = block_product("kmz,kzv->kmv", w, codes, precision, weights.dtype)
            mixed = cut_result(mixed, a - begin, b - begin)
            parts.append(mixed + jnp.sum(wide * zero, axis=-1, keepdims=True))
        return jnp.concatenate(parts, axis=-1)

    def _mixed_keys(
        self, spec: KVSpec, weights: jax.Array, block: Planes, precision: Any
    ) -> jax.Array:
        """Sums values that lie in the key, group by group of tokens."""
        K, M, Z = weights.shape
        first = spec.value_offset or 0
        last = first + spec.value_width
        stored = restored(block["key"], self._code)
        begin, end = whole_tiles(first, last, stored.shape[-1])
        codes = stored[..., begin:end].reshape(-1, self.group, end - begin)
        by_group = weights.reshape(K, M, Z // self.group, self.group)
        w = by_group.swapaxes(1, 2).reshape(-1, M, self.group)
        mixed = block_product("kmz,kzv->kmv", w, codes, precision, weights.dtype)
        mixed = cut_result(mixed, first - begin, last - begin)
        scale, zero = (block[f"key_{p}"][..., first:last] for p in ("scale", "zero"))
        mixed = mixed.reshape(K, -1, M, last - first) * scale[:, :, None]
        total = jnp.sum(by_group.astype(jnp.float32), axis=-1)
        base = block_product("kmz,kzv->kmv", total, zero, lax.Precision.HIGHEST, jnp.float32)
        return jnp.sum(mixed, axis=1) + base

    def _value_groups(self, spec: KVSpec) -> list[tuple[int, int]]:
        step = self.value_group or spec.value_width
        return [(a, min(a + step, spec.value_width)) for a in range(0, spec.value_width, step)]


def _by_channel(spec: KVSpec) -> list[tuple[str, int, int]]:
    """Lists the arrays with a scale per channel: name, heads, width."""
    found = [("key", spec.kv_heads, spec.key_width)]
    return [*found, ("shared", 1, spec.shared_width)] if spec.shared_width else found


def _finite(x: jax.Array) -> jax.Array:
    """Cuts infinities, so that the difference of two numbers is one."""
    limit = float(jnp.finfo(jnp.float32).max) / 2
    return jnp.clip(x.astype(jnp.float32), -limit, limit)
