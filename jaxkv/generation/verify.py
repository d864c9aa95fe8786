# SPDX-License-Identifier: Apache-2.0
"""Deciding how many drafted tokens stand, and which token follows them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.generation.sampling import Draw, filtered


def distribution(logits: jax.Array, sampling: Draw) -> jax.Array:
    """Gives the probabilities that tokens are drawn with: float32, shaped as `[..., vocab]`."""
    kept = filtered(logits.reshape(-1, logits.shape[-1]), sampling)
    return jax.nn.softmax(kept, axis=-1).reshape(logits.shape)


def verified(
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    probabilities: jax.Array | None,
    keys: jax.Array,
    sampling: Draw,
) -> tuple[jax.Array, jax.Array]:
    """Accepts drafted tokens so that the result is distributed as if none had been drafted.

    Args:
      logits: `[R, n + 1, vocab]`, the model's own, at the last token and at each drafted one.
      drafts: int32 `[R, n]`.
      count: int32 `[R]`, how many of them are real.
      probabilities: float32 `[R, n, vocab]`, which each was drawn from; `None` where a draft was
        not drawn at all.
      keys: PRNG keys `[R]`.
      sampling: How tokens are drawn; greedy accepts exactly the tokens it would have taken.

    Returns:
      int32 `[R, n + 1]`, the tokens that go on, and how many of the drafts stand, int32 `[R]`: so
      many tokens, and the one after them, are decided.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
    (arXiv:2211.17192), Algorithm 1.
    """
    n = drafts.shape[1]
    at = jnp.arange(n + 1, dtype=jnp.int32)[None]
    real = at[:, :n] < count[:, None]
    if sampling.greedy:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return best, _leading((best[:, :n] == drafts) & real)
    target = distribution(logits, sampling)
    if probabilities is None:
        probabilities = jax.nn.one_hot(drafts, target.shape[-1], dtype=jnp.float32)
    p, q = (_chosen(x, drafts) for x in (target[:, :n], probabilities))
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 0), (n,)))(keys)
    # Accepted with probability min(1, p / q), and never where p is 0.
    agreed = _leading((uniform * q < p) & real)
    after = _chosen_row(target, agreed)
    # Where no draft was turned down there is nothing to make up for.
    refused = _chosen_row(probabilities, jnp.minimum(agreed, n - 1))
    refused = jnp.where((agreed < count)[:, None], refused, 0.0)
    rest = jnp.maximum(after - refused, 0.0)
    # Rounding can leave nothing where both distributions are the same.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, after)
    drawn = jax.vmap(lambda key, p: jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(p)))
    token = drawn(keys, rest).astype(jnp.int32)[:, None]
    padded = jnp.concatenate([drafts, jnp.zeros_like(token)], axis=1)
    return jnp.where(at == agreed[:, None], token, padded), agreed


def _leading(good: jax.Array) -> jax.Array:
    """Counts the True entries before each row's first False."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)


def _chosen(x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def _chosen_row(x: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, number[:, None, None], axis=1)[:, 0]
