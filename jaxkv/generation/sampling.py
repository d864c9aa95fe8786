# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.core.trees import static


@dataclasses.dataclass(frozen=True)
class Sampling:
    """States how the next token is drawn; the default is greedy.

    Args:
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Keep the k most likely tokens; `None` keeps all.
      top_p: Keep the fewest most likely tokens whose probabilities reach p (nucleus sampling,
        arXiv:1904.09751); 1 keeps all.
      min_p: Keep tokens of at least `min_p` times the largest probability (arXiv:2407.01082).

    The filters apply in this order, each to what the one before left.

    Raises:
      ValueError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: want 0 (greedy) or more.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: want 1 or more, or None.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: want 0 < top_p <= 1.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: want 0 <= min_p <= 1.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """A `Sampling` as compiled programs take it: its numbers are arrays, what is off is `None`.

    So other numbers need no other program.

    Attributes:
      temperature: float32, or `None` for greedy.
      top_p: float32.
      min_p: float32.
      top_k: A size, so a constant.
    """

    temperature: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None
    top_k: int | None = static()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature is None


def draw_of(sampling: Sampling | Draw) -> Draw:
    """Turns a choice into what programs take, unless it is that already."""
    if isinstance(sampling, Draw):
        return sampling
    s = sampling

    def number(x: float, wanted: bool) -> jax.Array | None:
        return jnp.float32(x) if wanted else None

    return Draw(
        number(s.temperature, s.temperature > 0),
        number(s.top_p, s.top_p < 1),
        number(s.min_p, s.min_p > 0),
        s.top_k,
    )


def filtered(logits: jax.Array, sampling: Sampling | Draw) -> jax.Array:
    """Applies temperature and filters: float32 `[B, vocab]`, -inf where a token is out.

    >>> jnp.exp(filtered(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), Sampling(1.0, top_p=0.6))).tolist()
    [[0.5, 0.3, 0.0]]
    """
    sampling = draw_of(sampling)
    logits = logits.astype(jnp.float32)
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.min_p is not None:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling | Draw) -> jax.Array:
    """Draws one token for each row.

    Args:
      logits: `[B, vocab]`.
      keys: PRNG keys `[B]`, one for each row, so that a row's draw is its own.
      sampling: How.

    Returns:
      int32 `[B]`.
    """
    sampling = draw_of(sampling)
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = filtered(logits, sampling)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
