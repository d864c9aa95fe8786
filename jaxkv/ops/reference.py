# SPDX-License-Identifier: Apache-2.0
"""Plain attention in float32: the definition that every other path is held to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, capped, masked_softmax


@dataclasses.dataclass(frozen=True)
class Reference:
    """Repeats KV heads, widens everything to float32 and follows the formula."""

    name: str = "reference"

    def refuses(self, operands: Operands) -> str | None:
        """Refuses dropout, whose mask is another implementation's own."""
        return "no dropout" if operands.dropout_rate else None

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = operands
        query = o.emptied_query().astype(jnp.float32)
        key = jnp.repeat(o.emptied(o.key).astype(jnp.float32), o.groups, axis=2)
        value = jnp.repeat(o.emptied(o.value).astype(jnp.float32), o.groups, axis=2)

        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision=highest)
        scores = capped(scores * o.scale, o.soft_cap)
        if o.bias is not None:
            scores = scores + o.bias.astype(jnp.float32)
        seen = jnp.broadcast_to(o.seen(), scores.shape)
        weights, lse = masked_softmax(scores, seen)
        out = jnp.einsum("bnts,bsnv->btnv", weights, value, precision=highest)
        out, lse = add_sink(out, lse.swapaxes(1, 2), o.sink_logits)
        return out.astype(o.value.dtype), lse
