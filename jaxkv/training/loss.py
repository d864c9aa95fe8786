# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of the next token, as a sum and a count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.training.batch import Batch


def cross_entropy(
    logits: jax.Array, targets: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums the cross entropy over the wanted targets.

    Args:
      logits: `[B, T, vocab]`, any float; computed in float32.
      targets: int32 `[B, T]`.
      wanted: bool `[B, T]`.

    Returns:
      `(sum, count)`, float32 and int32 scalars. Sums and counts of parts of a batch add up, so
      their quotient does not depend on how a batch is split.

    >>> wanted = jnp.array([[True, True]])
    >>> total, count = cross_entropy(jnp.zeros((1, 2, 8)), jnp.array([[3, 5]]), wanted)
    >>> float(total) / int(count), int(count)
    (2.0794, 2)
    """
    # What stands in padding, NaN included, reaches neither the loss nor a gradient.
    scores = jnp.where(wanted[..., None], logits.astype(jnp.float32), 0.0)
    # A gather along an axis that a mesh splits has no placement of its own; a masked sum has.
    vocab = jnp.arange(scores.shape[-1], dtype=targets.dtype)
    hit = vocab[None, None, :] == targets[..., None]
    chosen = jnp.sum(jnp.where(hit, scores, 0.0), axis=-1)
    losses = jax.nn.logsumexp(scores, axis=-1) - chosen
    return jnp.sum(jnp.where(wanted, losses, 0.0)), jnp.sum(wanted.astype(jnp.int32))


def wanted_targets(batch: Batch) -> jax.Array:
    """Marks the tokens to predict: bool `[B, T]`, for tokens 1 to T of each row.

    A token is predicted iff the one before it is of the same document, it is no padding, and the
    mask keeps it.
    """
    wanted = jnp.ones(batch.targets.shape, bool)
    if batch.segment_ids is not None:
        before, after = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
        wanted = (before == after) & (after != 0)
    if batch.mask is not None:
        wanted = wanted & batch.mask[:, 1:]
    return wanted


def next_token_loss(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sums the cross entropy of each next token of a batch.

    Args:
      logits: `[B, T, vocab]` for the batch's inputs.
      batch: Of `[B, T + 1]` tokens.

    Returns:
      `(sum, count)` as in `cross_entropy`.

    Raises:
      ValueError: If the logits do not fit the batch.
    """
    if logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
        B, T = batch.targets.shape
        raise ValueError(f"logits {logits.shape}: want [{B}, {T}, vocab] for this batch.")
    return cross_entropy(logits, batch.targets, wanted_targets(batch))
