# SPDX-License-Identifier: Apache-2.0
"""What every way of decoding shares: its interface, the state of the loop, and the result."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.index import flagged, unflagged
from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.sharding import constrain
from jaxkv.core.trees import static
from jaxkv.generation.sampling import Draw, sample
from jaxkv.models.decoder import Decoder


class StopReason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    FULL = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """What a search found for each row, the best first.

    Attributes:
      tokens: int32 `[B, returns, max_new_tokens]`, new tokens (a stop token included), then 0.
      counts: int32 `[B, returns]`, how many of them each has; 0 where fewer were found.
      scores: float32 `[B, returns]`, log-probability / count ** length_penalty, falling.
      reasons: int32 `[B, returns]`, a `StopReason` for each.
    """

    tokens: jax.Array
    counts: jax.Array
    scores: jax.Array
    reasons: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` gives back.

    Attributes:
      tokens: int32 `[B, max_new_tokens]`, new tokens (a stop token included), then 0.
      counts: int32 `[B]`, how many of them each row has.
      reasons: int32 `[B]`, a `StopReason` for each row.
      pending: int32 `[B]`, each row's last token: the cache holds all tokens but this one, so
        a continuation begins with it.
      cache: The cache, to continue from.
      drafted: int32 `[B]`, tokens that were drafted and checked.
      accepted: int32 `[B]`, those of them that the row has.
      hypotheses: What `Beams` found; `tokens` are the best ones.
    """

    tokens: jax.Array
    counts: jax.Array
    reasons: jax.Array
    pending: jax.Array
    cache: ModelCache
    drafted: jax.Array
    accepted: jax.Array
    hypotheses: Hypotheses | None = None

    def rows(self) -> list[list[int]]:
        """Lists each row's new tokens."""
        counts = np.asarray(self.counts)
        return [row[:n].tolist() for row, n in zip(np.asarray(self.tokens), counts, strict=True)]

    def why(self) -> list[str]:
        """Names each row's reason: "stop token", "length" or "full"."""
        return [StopReason(r).name.lower().replace("_", " ") for r in np.asarray(self.reasons)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class How:
    """What is asked for: the sampling, the stop tokens int32 `[n]`, and the most new tokens."""

    sampling: Draw
    stop_tokens: jax.Array
    limit: int = static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """The prompts int32 `[B, T]`, their lengths int32 `[B]`, and what cross-attention reads."""

    tokens: jax.Array
    lengths: jax.Array
    context: jax.Array | None
    context_lengths: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """The state of the decode loop.

    Attributes:
      cache: Of R rows: B, or more where a way of decoding keeps several for each.
      tokens: int32 `[R, limit]`, new tokens.
      counts: int32 `[R]`, how many there are.
      reasons: int32 `[R]`, the loop ends when no row is `RUNNING`.
      pending: int32 `[R]`, each row's last token, which is not in the cache.
      keys: PRNG keys `[B]`.
      drafted: int32 `[R]`.
      accepted: int32 `[R]`.
      own: The pytree of the way of decoding.
    """

    cache: ModelCache
    tokens: jax.Array
    counts: jax.Array
    reasons: jax.Array
    pending: jax.Array
    keys: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    own: Any = None


class Decoding:
    """A way of decoding: one file each.

    It is a frozen dataclass and a pytree, whose leaves are the models that it brings along; what
    it keeps between steps is `Carry.own`.
    """

    def prepare(self, model: Decoder, how: How, given: Given, cache: ModelCache) -> Any:
        """Checks, before anything runs, that this can be done; allocates what `begin` is given.

        Raises:
          ValueError: If it cannot.
        """
        del model, how, given, cache

    def begin(
        self, how: How, given: Given, prepared: Any, logits: jax.Array, cache: ModelCache, keys: Any
    ) -> Carry:
        """Takes each row's first token, given the logits `[B, vocab]` after the prompts."""
        del given, prepared
        return started(how, logits, cache, keys)

    def step(self, model: Decoder, how: How, carry: Carry) -> Carry:
        """Goes on by at least one token in some row, or ends it."""
        raise NotImplementedError

    def finish(self, model: Decoder, how: How, carry: Carry) -> Generation:
        """Makes the result."""
        del model, how
        c = carry
        parts = (c.tokens, c.counts, c.reasons, c.pending, c.cache, c.drafted, c.accepted)
        return Generation(*parts)

    @property
    def streams(self) -> bool:
        """Whether a row's tokens are final once they are there."""
        return True


def started(how: How, logits: jax.Array, cache: ModelCache, keys: jax.Array) -> Carry:
    """Begins with one drawn token in each row whose prompt is in the cache."""
    lost = cache.overflowed
    B = lost.shape[0]

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    reasons = jnp.where(lost, StopReason.FULL, StopReason.RUNNING).astype(jnp.int32)
    counts = (zeros(B), zeros(B), zeros(B), zeros(B))
    tokens = zeros(B, how.limit)
    carry = Carry(cache, tokens, counts[0], reasons, counts[1], keys, counts[2], counts[3])
    return drawn(how, carry, logits, running(carry), jnp.zeros_like(lost))


def running(carry: Carry) -> jax.Array:
    """Says which rows go on: bool `[R]`."""
    return carry.reasons == StopReason.RUNNING


def step_keys(carry: Carry) -> jax.Array:
    """Gives each row the key of its next draw, which depends on its seed and its count alone."""
    return jax.vmap(jax.random.fold_in)(carry.keys, carry.counts)


def fed(
    model: Decoder, cache: ModelCache, tokens: jax.Array, lengths: jax.Array, **context: Any
) -> tuple[jax.Array, ModelCache, jax.Array]:
    """Feeds tokens `[R, T]`, of which `lengths int32[R]` are real.

    Returns:
      Hidden states `[R, T, D]`, the cache, and how many of each row's tokens found room, int32
      `[R]`: the caller deals with the others, so no flag is raised for them.
    """
    x, after = model.hidden(tokens, cache=cache, lengths=lengths, **context)
    assert after is not None  # since one was given
    stored = after.lengths - cache.lengths
    indices = tuple(map(flagged, map(unflagged, after.indices), cache.indices))
    return x, dataclasses.replace(after, indices=indices), stored


def drawn(how: How, carry: Carry, logits: jax.Array, wanted: jax.Array, ended: jax.Array) -> Carry:
    """Draws the next token from logits `[R, vocab]` in the rows where one is wanted."""
    token = sample(constrain(logits, ("batch", None)), step_keys(carry), how.sampling)
    return advanced(how, carry, token[:, None], wanted.astype(jnp.int32), ended)


def until_stop(how: How, new: jax.Array, count: jax.Array) -> jax.Array:
    """Cuts the first `count int32[R]` of new tokens `[R, n]` behind the first stop token."""
    at = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    stops = is_stop(how, new) & (at < count[:, None])
    first = jnp.argmax(stops, axis=1).astype(jnp.int32) + 1
    return jnp.where(jnp.any(stops, axis=1), first, count)


def advanced(how: How, carry: Carry, new: jax.Array, count: jax.Array, ended: jax.Array) -> Carry:
    """Appends new tokens and decides which rows go on.

    Args:
      how: What is asked for.
      carry: With the cache that holds all tokens but the last new one.
      new: int32 `[R, n]`.
      count: int32 `[R]`, how many of them, cut at stop tokens; 0 where a row does not run.
      ended: bool `[R]`, there is no room for the row's next token.
    """
    limit = carry.tokens.shape[1]
    place = jnp.arange(limit, dtype=jnp.int32)[None] - carry.counts[:, None]
    values = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    fresh = (place >= 0) & (place < count[:, None])
    last = jnp.take_along_axis(new, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    pending = jnp.where(count > 0, last, carry.pending)
    counts = carry.counts + count
    full = ended | (carry.cache.lengths >= carry.cache.capacity)
    reasons = jnp.where(full, StopReason.FULL, StopReason.RUNNING)
    reasons = jnp.where(counts >= limit, StopReason.LENGTH, reasons)
    reasons = jnp.where(is_stop(how, pending) & (count > 0), StopReason.STOP_TOKEN, reasons)
    return dataclasses.replace(
        carry,
        tokens=jnp.where(fresh, values, carry.tokens),
        counts=counts,
        reasons=jnp.where(running(carry), reasons, carry.reasons).astype(jnp.int32),
        pending=pending,
    )


def is_stop(how: How, tokens: jax.Array) -> jax.Array:
    """Says which tokens are stop tokens."""
    stops = how.stop_tokens.reshape((1,) * tokens.ndim + (-1,))
    return jnp.any(tokens[..., None] == stops, axis=-1)
