# SPDX-License-Identifier: Apache-2.0
"""Plain attention in float32: the definition that every other path is held to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.ops.dropping import dropped
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, masked_softmax, modified


@dataclasses.dataclass(frozen=True)
class Reference:
    """Repeats KV heads, widens everything to float32 and follows the formula."""

    name: str = "reference"

    def refuses(self, operands: Operands) -> str | None:
        """Refuses nothing."""
        del operands
        return None

    def yields(self, operands: Operands) -> str | None:
        """Yields to the others, which need not be so plain."""
        del operands
        return "slow: it is what the others are held to"

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = operands
        query = o.emptied_query().astype(jnp.float32)
        key = jnp.repeat(o.emptied(o.key).astype(jnp.float32), o.groups, axis=2)
        value = jnp.repeat(o.emptied(o.value).astype(jnp.float32), o.groups, axis=2)

        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision=highest)
        scores = modified(o, scores, o.extras())
        seen = jnp.broadcast_to(o.seen(), scores.shape)
        weights, lse = masked_softmax(scores, seen)
        weights = dropped(weights, o)
        out = jnp.einsum("bnts,bsnv->btnv", weights, value, precision=highest)
        out, lse = add_sink(out, lse.swapaxes(1, 2), o.sink_logits)
        return out.astype(o.value.dtype), lse
