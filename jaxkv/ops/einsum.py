# SPDX-License-Identifier: Apache-2.0
"""Grouped attention as two batched products: any platform, any feature, [T, S] memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.core.numerics import lone_row_doubled
from jaxkv.ops.dropping import dropped
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, masked_softmax, modified

# Scores of a head, up to which taking them in tiles saves neither time nor memory.
TILE_SCORES = 2**16


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Keeps KV heads grouped (nothing is repeated) and scores in float32."""

    name: str = "einsum"

    def refuses(self, operands: Operands) -> str | None:
        """Refuses nothing: this is the path that always works."""
        del operands
        return None

    def yields(self, operands: Operands) -> str | None:
        """Yields where the scores outgrow a tile."""
        T, S = operands.query.shape[1], operands.key.shape[1]
        return None if T * S <= TILE_SCORES else f"holds all {T} x {S} scores of a head at once"

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = operands
        B, T, N, H = o.query.shape
        K, S, G, V = o.key.shape[2], o.key.shape[1], o.groups, o.value.shape[-1]
        key, value = o.emptied(o.key), o.emptied(o.value)

        # [B, K, G*T, H]: one product per KV head with all its query rows, heads before tokens
        # so that the scores need no transpose.
        query = o.emptied_query().reshape(B, T, K, G, H)
        query = query.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
        scores = jnp.einsum(
            "bkmh,bskh->bkms",
            lone_row_doubled(query, 2),
            key,
            precision=o.precision,
            preferred_element_type=jnp.float32,
        )[:, :, : G * T]
        scores = modified(o, scores.reshape(B, N, T, S), o.extras())
        weights, lse = masked_softmax(scores, jnp.broadcast_to(o.seen(), scores.shape))
        weights = dropped(weights, o).astype(value.dtype).reshape(B, K, G * T, S)
        out = jnp.einsum(
            "bkms,bskv->bkmv",
            lone_row_doubled(weights, 2),
            value,
            precision=o.precision,
            preferred_element_type=jnp.float32,
        )[:, :, : G * T]
        out = out.reshape(B, N, T, V).swapaxes(1, 2)
        out, lse = add_sink(out, lse.swapaxes(1, 2), o.sink_logits)
        return out.astype(o.value.dtype), lse
