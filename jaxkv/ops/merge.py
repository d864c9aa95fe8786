# SPDX-License-Identifier: Apache-2.0
"""Joining attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.core.numerics import exp_below


def merge(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges attention outputs over disjoint keys into the output over all of them.

    Args:
      outs: Partial outputs, each `[..., V]`.
      lses: Their log-sum-exps, each float32 `[...]`; -inf where a part saw nothing.

    Returns:
      `(out float32[..., V], lse float32[...])`. Merging with an empty part returns the other
      part bit for bit; if all parts are empty the result is 0 and -inf.

    Raises:
      ValueError: If there is no part, or shapes differ.

    Source: FlashAttention-2 (arXiv:2307.08691), section 2.3.

    >>> out, lse = merge([jnp.array([1.0]), jnp.array([3.0])], [jnp.array(0.0), jnp.array(0.0)])
    >>> out.tolist(), round(float(lse), 4)
    ([2.0], 0.6931)
    """
    shapes = [x.shape for x in outs], [x.shape for x in lses]
    if not lses or [x[:-1] for x in shapes[0]] != shapes[1] or len(set(shapes[0])) != 1:
        raise ValueError(f"outs {shapes[0]}, lses {shapes[1]}: want [..., V] and [...], one each.")
    top = jnp.max(jnp.stack(lses), axis=0)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    scales = [_safe_exp(lse, top) for lse in lses]
    total = sum(scales[1:], scales[0])
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    parts = [
        o.astype(jnp.float32) * (s / safe)[..., None] for o, s in zip(outs, scales, strict=True)
    ]
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
    return sum(parts[1:], parts[0]), lse


def add_sink(
    out: jax.Array, lse: jax.Array, sink_logits: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Lets a learned logit per head take its share of the softmax, with no value.

    It is applied once, after all parts are merged, so that splitting cannot count it twice.

    Args:
      out: `[B, T, N, V]`.
      lse: float32 `[B, T, N]`.
      sink_logits: `[N]`, or `None`.

    Returns:
      `(out, lse)` with the sink in the normaliser.

    Source: gpt-oss (arXiv:2508.10925), section 2.2.
    """
    if sink_logits is None:
        return out, lse
    sink = sink_logits.astype(jnp.float32)[None, None]
    seen = jnp.isfinite(lse)
    finite = jnp.where(seen, lse, 0.0)
    joined = jnp.logaddexp(finite, sink)
    share = jnp.where(seen, exp_below(finite - joined), 0.0)
    joined = jnp.where(seen, joined, jnp.broadcast_to(sink, lse.shape))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), joined


def _safe_exp(lse: jax.Array, top: jax.Array) -> jax.Array:
    seen = jnp.isfinite(lse)
    return jnp.where(seen, exp_below(jnp.where(seen, lse - top, 0.0)), 0.0)
