# SPDX-License-Identifier: Apache-2.0
"""What an attention implementation is handed: checked arrays and the static choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxkv.core.numerics import exp_below
from jaxkv.core.trees import static
from jaxkv.core.visibility import Visibility, visible

# What an implementation may lack, by the names that users read, and where a call has it.
FEATURES = {
    "bias": "bias",
    "mask": "mask",
    "ALiBi slopes": "alibi_slopes",
    "soft-cap": "soft_cap",
    "dropout": "dropout_seeds",
    "segments": "q_segments",
}


class Extras(NamedTuple):
    """What is added to the scores, in shapes that broadcast against them; each may be None.

    Attributes:
      bias: The caller's.
      slopes: ALiBi's, one per head.
      distance: float32, how far each key stands from each query, in tokens.
    """

    bias: jax.Array | None
    slopes: jax.Array | None
    distance: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """One attention call, checked and normalised by `ops.api`.

    Shapes: query `[B, T, N, H]`, key `[B, S, K, H]`, value `[B, S, K, V]`; orders int32 `[B|1, T]`
    and `[B|1, S]` (-1 = unfilled); segments int32 `[B, T]`, `[B, S]` or None; mask bool and
    bias float, both 4-D and broadcastable to `[B, N, T, S]`, or None; sink_logits and alibi_slopes
    float `[N]`; dropout_seeds uint32 `[B, N, 2]`, for each row and head, so that a mesh draws what
    one device draws. `offset` is the order of query 0 among the keys where it is known and all
    orders count up by one, else None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    q_order: jax.Array
    k_order: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    mask: jax.Array | None
    bias: jax.Array | None
    sink_logits: jax.Array | None
    alibi_slopes: jax.Array | None
    dropout_seeds: jax.Array | None
    rule: Visibility = static()
    scale: float = static()
    soft_cap: float | None = static()
    dropout_rate: float = static()
    precision: Any = static()
    all_filled: bool = static()
    offset: int | None = static()
    lse_wanted: bool = static()

    @property
    def groups(self) -> int:
        """G, the query heads that share one KV head."""
        return self.query.shape[2] // self.key.shape[2]

    def emptied(self, x: jax.Array) -> jax.Array:
        """Zeroes the keys or values `[B, S, K, *]` of unfilled slots and padding.

        Such a slot may hold NaN, and a weight of 0 times NaN is NaN.
        """
        filled = None if self.all_filled else self.k_order >= 0
        if self.k_segments is not None:
            real = self.k_segments != 0
            filled = real if filled is None else filled & real
        if filled is None:
            return x
        filled = jnp.broadcast_to(filled, x.shape[:2])[:, :, None, None]
        return jnp.where(filled, x, jnp.zeros((), x.dtype))

    def emptied_query(self) -> jax.Array:
        """Zeroes the queries of padding: NaN there would reach every key's gradient."""
        if self.q_segments is None:
            return self.query
        real = (self.q_segments != 0)[:, :, None, None]
        return jnp.where(real, self.query, jnp.zeros((), self.query.dtype))

    def extras(self) -> Extras:
        """Gathers what is added to scores `[B, N, T, S]`."""
        if self.alibi_slopes is None:
            return Extras(self.bias, None, None)
        distance = distances(self.q_order, self.k_order)[:, None]
        return Extras(self.bias, self.alibi_slopes[:, None, None][None], distance)

    def given(self, *names: str) -> str | None:
        """Says which of some features a call has that an implementation lacks, if any.

        Args:
          *names: Keys of `FEATURES`.
        """
        return next((f"has no {n}" for n in names if getattr(self, FEATURES[n]) is not None), None)

    def seen(self) -> jax.Array:
        """Applies the visibility rule: bool `[B|1, N|1, T, S]`."""
        return visible(
            self.rule, self.q_order, self.k_order, self.q_segments, self.k_segments, self.mask
        )


class Scaled(Protocol):
    """States how products become scores, before anything is added."""

    @property
    def scale(self) -> float:
        """What multiplies the products."""
        ...

    @property
    def soft_cap(self) -> float | None:
        """What bounds the scores, or `None`."""
        ...


class Implementation(Protocol):
    """One way to compute attention; a new kernel is one file with one of these."""

    @property
    def name(self) -> str:
        """The name that users choose it by."""
        ...

    def refuses(self, operands: Operands) -> str | None:
        """Says which feature is missing for this call, or `None` if it can serve."""
        ...

    def yields(self, operands: Operands) -> str | None:
        """Says why another one suits this call better, though this one can serve; else `None`."""
        ...

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`, sinks included."""
        ...


def capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Squashes scores into (-cap, cap) by tanh (Gemma 2, arXiv:2408.00118, section 2)."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def modified(how: Scaled, scores: jax.Array, extras: Extras) -> jax.Array:
    """Turns bare products into scores: scale, soft-cap, then what is added; float32."""
    scores = capped(scores * how.scale, how.soft_cap)
    if extras.bias is not None:
        scores = scores + extras.bias.astype(jnp.float32)
    if extras.slopes is not None and extras.distance is not None:
        scores = scores - extras.slopes.astype(jnp.float32) * extras.distance
    return scores


def distances(q_order: jax.Array, k_order: jax.Array) -> jax.Array:
    """Counts the tokens between queries `[..., T]` and keys `[..., S]`: float32 `[..., T, S]`."""
    return jnp.abs(q_order[..., :, None] - k_order[..., None, :]).astype(jnp.float32)


def masked_softmax(scores: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalises float32 scores over the keys that are seen.

    Args:
      scores: float32 `[..., S]`; entries that are not seen may be anything, NaN included.
      seen: bool, same shape.

    Returns:
      `(weights [..., S], lse [...])`; a row that sees nothing has weights 0 and lse -inf, and
      its gradient is 0.
    """
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    # `where` on both sides of exp: an unseen score must not reach exp's gradient either.
    weights = jnp.where(seen, exp_below(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    empty = total == 0
    weights = weights / jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1.0, total)) + top)
    return weights, lse[..., 0]


def empty_result(o: Operands) -> tuple[jax.Array, jax.Array] | None:
    """Gives `(out, lse)` of a call with an empty array: 0 and -inf; `None` for any other."""
    if 0 not in (*o.query.shape, *o.value.shape):
        return None
    B, T, N, _ = o.query.shape
    out = jnp.zeros((B, T, N, o.value.shape[-1]), o.value.dtype)
    return out, jnp.full((B, T, N), -jnp.inf, jnp.float32)


def first_order(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a kernel's gradient `fn(how, *arrays)` say that it cannot be derived itself.

    Raises:
      TypeError: When it is, forwards or backwards; Pallas would fail without a word.
    """

    def refuse(*_: Any) -> Any:
        raise TypeError(
            f"{name} has no second derivatives, forward-mode or reverse: choose einsum for them."
        )

    once = jax.custom_vjp(fn, nondiff_argnums=(0,))
    once.defvjp(refuse, refuse)
    return once


def primals(tree: Any) -> Any:
    """Takes what a gradient rule with symbolic zeros is handed as plain arrays."""
    return jax.tree.map(lambda x: x.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


def cotangents(
    out: jax.Array, lse: jax.Array, d_out: Any, d_lse: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turns the gradients by both results into `(d_out, shift, delta)`.

    `shift` is the lse, finite where nothing was seen; `delta` is the sum of `d_out` times the
    output, less the lse's gradient (FlashAttention-2, arXiv:2307.08691, section 3.1).
    """
    seen_any = jnp.isfinite(lse)
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros_like(out)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if not isinstance(d_lse, SymbolicZero):
        delta = delta - jnp.where(seen_any, d_lse, 0.0)
    return d_out, jnp.where(seen_any, lse, 0.0), delta
