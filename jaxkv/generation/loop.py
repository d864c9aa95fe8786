# SPDX-License-Identifier: Apache-2.0
"""Text generation: prefill, then the whole decode loop as one program on the device."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.sharding import constrain
from jaxkv.core.trees import check_sizes
from jaxkv.generation.prompts import (
    bucket,
    check_context,
    check_fit,
    checked_stops,
    padded_prompts,
)
from jaxkv.generation.sampling import Sampling, sample
from jaxkv.models.decoder import Decoder


class StopReason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    FULL = 3


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
    """

    tokens: jax.Array
    counts: jax.Array
    reasons: jax.Array
    pending: jax.Array
    cache: ModelCache

    def rows(self) -> list[list[int]]:
        """Lists each row's new tokens."""
        counts = np.asarray(self.counts)
        return [row[:n].tolist() for row, n in zip(np.asarray(self.tokens), counts, strict=True)]

    def why(self) -> list[str]:
        """Names each row's reason: "stop token", "length" or "full"."""
        return [StopReason(r).name.lower().replace("_", " ") for r in np.asarray(self.reasons)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    cache: ModelCache
    tokens: jax.Array
    counts: jax.Array
    reasons: jax.Array
    pending: jax.Array
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class _How:
    sampling: Sampling
    stop_tokens: tuple[int, ...]


OnTokens = Callable[[list[list[int]]], None]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | jax.Array | np.ndarray,
    *,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | int = (),
    seed: int = 0,
    cache: ModelCache | None = None,
    context: jax.Array | None = None,
    context_lengths: jax.Array | None = None,
    on_tokens: OnTokens | None = None,
    stream_every: int = 8,
) -> Generation:
    """Generates tokens after prompts.

    Args:
      model: The language model.
      prompts: Token lists of any lengths, or int32 `[B, T]` with `lengths`.
      max_new_tokens: The most tokens a row gets.
      lengths: int32 `[B]`, real tokens of each row of an array of prompts; default all.
      sampling: How tokens are drawn; default greedy.
      stop_tokens: A row ends with the first of these that it draws.
      seed: Of all draws. A row's draws depend on the seed and its row number alone.
      cache: Continues it (it is donated: use the one that comes back); default a fresh one that
        fits prompts, new tokens and context.
      context: `[B, S, Dc]`, what layers of cross-attention read, unless the cache holds one.
      context_lengths: int32 `[B]`, how many of the S context tokens are real.
      on_tokens: Called about every `stream_every` tokens with a list that holds, for each row,
        the list of its newest tokens.
      stream_every: Tokens between two calls of `on_tokens`.

    Returns:
      The new tokens, and for each row why it stopped: a stop token, the length, or a full cache.

    Raises:
      ValueError: If prompts are empty, hold unknown tokens or do not fit the cache.
    """
    if stream_every < 1:
        raise ValueError(f"stream_every={stream_every}: want at least 1.")
    run = Run(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        sampling=sampling,
        stop_tokens=stop_tokens,
        seed=seed,
        cache=cache,
        context=context,
        context_lengths=context_lengths,
    )
    shown = np.zeros(run.carry.counts.shape, np.int64)
    if on_tokens is not None:
        shown = _show(run.carry, shown, on_tokens)
    while run.decode(max_new_tokens if on_tokens is None else stream_every):
        if on_tokens is not None:
            shown = _show(run.carry, shown, on_tokens)
    c = run.carry
    return Generation(c.tokens, c.counts, c.reasons, c.pending, c.cache)


class Run:
    """A generation under way: the prompts are read, and decoding goes on in steps.

    Arguments as in `generate`.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Any,
        *,
        max_new_tokens: int,
        lengths: jax.Array | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | int = (),
        seed: int = 0,
        cache: ModelCache | None = None,
        context: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
    ) -> None:
        check_sizes(max_new_tokens=max_new_tokens)
        sampling = sampling if sampling is not None else Sampling()
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling={sampling!r}: want a Sampling, such as Sampling(0.8).")
        tokens, lengths = padded_prompts(prompts, lengths, model)
        B = tokens.shape[0]
        if cache is None:
            # Rounded up like the prompts, so that few capacities compile anew.
            longest = int(np.max(np.asarray(lengths))) + int(max_new_tokens)
            width = None if context is None else np.shape(context)[1]
            cache = model.init_cache(B, bucket(longest, model), context_capacity=width)
        check_fit(cache, np.asarray(lengths))
        check_context(cache, context, context_lengths)
        # Its flags are of earlier calls; a row that overflows now is told from those.
        cache = cache.clear_flags()
        self.how = _How(sampling, checked_stops(stop_tokens, model.vocab))
        self.graph, state = nnx.split(model)
        self.state = nnx.as_pure(state)
        keys = jax.random.split(jax.random.key(seed), B)
        fresh = jnp.zeros((B, max_new_tokens), jnp.int32)
        given = (tokens, lengths, context, context_lengths)
        self.carry = _prefill(self.graph, self.how, self.state, given, cache, keys, fresh)

    def decode(self, steps: int) -> bool:
        """Runs up to `steps` decode steps; says whether it had any row to go on with."""
        running = np.any(np.asarray(self.carry.reasons) == StopReason.RUNNING)
        if running:
            self.carry = _decode(self.graph, self.how, self.state, self.carry, jnp.int32(steps))
            jax.block_until_ready(self.carry.tokens)
        return bool(running)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 6))
def _prefill(
    graph: Any,
    how: _How,
    state: Any,
    given: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None],
    cache: ModelCache,
    keys: jax.Array,
    fresh: jax.Array,
) -> _Carry:
    """Reads the prompts and draws each row's first token."""
    model = nnx.merge(graph, state)
    tokens, lengths, context, context_lengths = given
    x, cache = model.hidden(
        tokens,
        cache=cache,
        lengths=lengths,
        context=context,
        context_lengths=context_lengths,
    )
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    x = jnp.take_along_axis(x, last, axis=1)
    zeros = jnp.zeros_like(lengths)
    running = jnp.where(cache.overflowed, StopReason.FULL, StopReason.RUNNING).astype(jnp.int32)
    carry = _Carry(cache, fresh, zeros, running, zeros, keys)
    return _drawn(how, carry, model.logits(x)[:, 0])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def _decode(graph: Any, how: _How, state: Any, carry: _Carry, steps: jax.Array) -> _Carry:
    """Runs up to `steps` decode steps, or until every row has stopped."""
    model = nnx.merge(graph, state)

    def going(loop: tuple[jax.Array, _Carry]) -> jax.Array:
        step, carry = loop
        return (step < steps) & jnp.any(carry.reasons == StopReason.RUNNING)

    def body(loop: tuple[jax.Array, _Carry]) -> tuple[jax.Array, _Carry]:
        step, carry = loop
        active = (carry.reasons == StopReason.RUNNING).astype(jnp.int32)
        x, cache = model.hidden(carry.pending[:, None], cache=carry.cache, lengths=active)
        carry = dataclasses.replace(carry, cache=cache)
        return step + 1, _drawn(how, carry, model.logits(x)[:, 0])

    return lax.while_loop(going, body, (jnp.int32(0), carry))[1]


def _drawn(how: _How, carry: _Carry, logits: jax.Array) -> _Carry:
    """Draws the next token of each running row and decides whether the row goes on."""
    active = carry.reasons == StopReason.RUNNING
    logits = constrain(logits, ("batch", None))
    keys = jax.vmap(jax.random.fold_in)(carry.keys, carry.counts)
    token = jnp.where(active, sample(logits, keys, how.sampling), carry.pending)
    place = jnp.where(active, carry.counts, carry.tokens.shape[1])[:, None]
    column = jnp.arange(carry.tokens.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(column == place, token[:, None], carry.tokens)
    counts = carry.counts + active.astype(jnp.int32)
    stops = jnp.zeros_like(active)
    for stop in how.stop_tokens:
        stops = stops | (token == stop)
    reasons = jnp.where(carry.cache.lengths >= carry.cache.capacity, StopReason.FULL, 0)
    reasons = jnp.where(counts >= carry.tokens.shape[1], StopReason.LENGTH, reasons)
    reasons = jnp.where(stops, StopReason.STOP_TOKEN, reasons)
    reasons = jnp.where(active, reasons, carry.reasons).astype(jnp.int32)
    return dataclasses.replace(carry, tokens=tokens, counts=counts, reasons=reasons, pending=token)


def _show(carry: _Carry, shown: np.ndarray, on_tokens: OnTokens) -> np.ndarray:
    counts, tokens = np.asarray(carry.counts), np.asarray(carry.tokens)
    new = [row[a:b].tolist() for row, a, b in zip(tokens, shown, counts, strict=True)]
    if any(new):
        on_tokens(new)
    return counts.astype(np.int64)
