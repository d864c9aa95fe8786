# SPDX-License-Identifier: Apache-2.0
"""The two forms of latent attention: heads expanded from the latent, or queries absorbed in it."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import Codec, Planes, Raw
from jaxkv.cache.spec import KVSpec
from jaxkv.core.products import project
from jaxkv.core.sharding import constrain, current_mesh, out_sharding

# Rows up to which a product of each head's own kernel is a sum on CPU.
FEW_ROWS = 4


class LatentWeights(NamedTuple):
    """key_up `[C, N, H]` and value_up `[C, N, V]`, in the compute dtype."""

    key_up: jax.Array
    value_up: jax.Array


def expand(weights: LatentWeights, record: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes every head's key `[B, T, N, H + R]` and value `[B, T, N, V]` of records.

    Args:
      weights: The two up-projections.
      record: `[B, T, 1, C + R]`, latent and rotated shared key.
    """
    C = weights.key_up.shape[0]
    latent, shared = record[:, :, 0, :C], record[..., C:]
    key = project(latent, weights.key_up, 1, ("heads", None))
    value = project(latent, weights.value_up, 1, ("heads", None))
    shared = jnp.broadcast_to(shared, (*key.shape[:3], shared.shape[-1]))
    shared = constrain(shared, ("batch", None, "heads", None))
    return jnp.concatenate([key, shared], axis=-1), value


def absorb(weights: LatentWeights, query: jax.Array) -> jax.Array:
    """Moves queries `[B, T, N, H + R]` into the record's space: `[B, T, N, C + R]`."""
    H = weights.key_up.shape[2]
    moved = _per_head("btnh,cnh->btnc", query[..., :H], weights.key_up)
    return jnp.concatenate([moved, query[..., H:]], axis=-1)


def unabsorb(weights: LatentWeights, out: jax.Array) -> jax.Array:
    """Moves outputs in the latent space `[B, T, N, C]` to values `[B, T, N, V]`."""
    return _per_head("btnc,cnv->btnv", out, weights.value_up)


@dataclasses.dataclass(frozen=True)
class ExpandedHeads:
    """Lets the read loop expand a block of latents just before it is attended.

    Args:
      key_width: H + R.
      value_width: V.
      dtype: Name of the compute dtype.
    """

    key_width: int
    value_width: int
    dtype: str

    def spec(self, num_heads: int) -> KVSpec:
        """One key and value for each of the device's heads."""
        return KVSpec(num_heads, self.key_width, self.value_width)

    @property
    def codec(self) -> Codec:
        """Expanded heads are raw."""
        return Raw(jnp.dtype(self.dtype))

    @property
    def weight_axes(self) -> LatentWeights:
        """Both kernels are split by heads."""
        return LatentWeights((None, "heads", None), (None, "heads", None))  # type: ignore[arg-type]

    def apply(self, weights: LatentWeights, spec: KVSpec, codec: Codec, block: Planes) -> Planes:
        """Expands one block `[1, Z, C + R]` to planes `[N, Z, *]`."""
        record, _ = codec.decode(spec, {name: x[None] for name, x in block.items()})
        key, value = expand(weights, record.astype(weights.key_up.dtype))
        return {"key": key[0].swapaxes(0, 1), "value": value[0].swapaxes(0, 1)}


def _per_head(expr: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies each head's rows `[B, T, N, *]` by its part of a kernel `[C, N, *]`.

    XLA's CPU backend copies the whole kernel, heads first, before such a product. For a few rows
    (a decode step) it is faster to multiply and sum where the kernel lies.
    """
    if x.shape[0] * x.shape[1] > FEW_ROWS or current_mesh() is not None:
        return _product(expr, x, kernel)

    def summed(x: jax.Array, kernel: jax.Array) -> jax.Array:
        wide, parts = x.astype(jnp.float32), kernel.astype(jnp.float32)[None, None]
        if expr.startswith("btnh"):
            out = jnp.sum(wide[:, :, None] * parts, axis=4).swapaxes(2, 3)
        else:
            out = jnp.sum(wide.swapaxes(2, 3)[..., None] * parts, axis=2)
        return out.astype(x.dtype)

    product = functools.partial(_product, expr)
    return lax.platform_dependent(x, kernel, cpu=summed, default=product)


def _product(expr: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies an activation by a per-head kernel, placed by rows and heads."""
    result = expr.split("->")[1]
    sizes = dict(zip(expr.split("->")[0].replace(",", ""), (*x.shape, *kernel.shape), strict=True))
    names = {"b": "batch", "n": "heads"}
    axes, shape = [names.get(a) for a in result], [sizes[a] for a in result]
    return jnp.einsum(expr, x, kernel, out_sharding=out_sharding(axes, shape))
