# SPDX-License-Identifier: Apache-2.0
"""Text generation: prefill, then the whole decode loop as one program on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.trees import check_sizes
from jaxkv.generation.decoding import Carry, Decoding, Generation, Given, How, running
from jaxkv.generation.plain import Plain
from jaxkv.generation.prompts import (
    bucket,
    check_context,
    check_fit,
    checked_stops,
    padded_prompts,
)
from jaxkv.generation.sampling import Sampling, draw_of
from jaxkv.models.decoder import Decoder

OnTokens = Callable[[list[list[int]]], None]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | jax.Array | np.ndarray,
    *,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    sampling: Sampling | None = None,
    decoding: Decoding | None = None,
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
      decoding: `PromptLookup()` or `DraftModel(model)` check several drafted tokens a step, with
        the same result; `Beams()` searches for the most likely text. Default one token a step.
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
      ValueError: If prompts are empty, hold unknown tokens or do not fit the cache, or if the way
        of decoding does not go with the cache, the model or the sampling.
    """
    if stream_every < 1:
        raise ValueError(f"stream_every={stream_every}: want at least 1.")
    decoding = Plain() if decoding is None else decoding
    if not isinstance(decoding, Decoding):
        raise ValueError(f"decoding={decoding!r}: want a Decoding, such as PromptLookup().")
    if on_tokens is not None and not decoding.streams:
        raise ValueError(f"on_tokens: no token of {decoding} is final before the end.")
    run = Run(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        sampling=sampling,
        decoding=decoding,
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
    return decoding.finish(model, run.how, run.carry)


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
        lengths: jax.Array | None,
        sampling: Sampling | None,
        decoding: Decoding,
        stop_tokens: Sequence[int] | int,
        seed: int,
        cache: ModelCache | None,
        context: jax.Array | None,
        context_lengths: jax.Array | None,
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
        stops = checked_stops(stop_tokens, model.vocab)
        self.how = How(draw_of(sampling), jnp.asarray(stops, jnp.int32), int(max_new_tokens))
        given = Given(tokens, lengths, context, context_lengths)
        prepared = decoding.prepare(model, self.how, given, cache)
        # Its flags are of earlier calls; a row that overflows now is told from those.
        cache = cache.clear_flags()
        self.model, self.decoding = _parted(model), _parted(decoding)
        keys = jax.random.split(jax.random.key(seed), B)
        logits, cache = _prefill(*self.model, given, cache)
        # The cache passes through untouched, unless its rows are multiplied.
        graph, state = self.decoding
        self.carry = _begin(graph, self.how, state, given, prepared, logits, cache, keys)

    def decode(self, tokens: int) -> bool:
        """Goes on until some row has so many tokens more; says whether any row could."""
        going = np.any(np.asarray(running(self.carry)))
        if going:
            graphs, states = zip(self.model, self.decoding, strict=True)
            self.carry = _decode(graphs, self.how, states, self.carry, jnp.int32(tokens))
            jax.block_until_ready(self.carry.tokens)
        return bool(going)


def _parted(what: Any) -> tuple[Any, Any]:
    """Parts modules into what compiled programs are made for, and their arrays."""
    graph, state = nnx.split(what)
    return graph, nnx.as_pure(state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(
    graph: Any, state: Any, given: Given, cache: ModelCache
) -> tuple[jax.Array, ModelCache]:
    """Reads the prompts: logits `[B, vocab]` after each row's last token, and the cache."""
    model = nnx.merge(graph, state)
    x, cache = model.hidden(
        given.tokens,
        cache=cache,
        lengths=given.lengths,
        context=given.context,
        context_lengths=given.context_lengths,
    )
    last = jnp.maximum(given.lengths - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(x, last, axis=1))[:, 0], cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _begin(graph: Any, how: How, state: Any, given: Given, prepared: Any, *read: Any) -> Carry:
    decoding = nnx.merge(graph, state)
    return decoding.begin(how, given, prepared, *read)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode(graphs: Any, how: How, states: Any, carry: Carry, tokens: jax.Array) -> Carry:
    """Decodes until some row has `tokens` more, or until every row has stopped."""
    model, decoding = map(nnx.merge, graphs, states)

    before = carry.counts

    def going(carry: Carry) -> jax.Array:
        return (jnp.max(carry.counts - before) < tokens) & jnp.any(running(carry))

    return lax.while_loop(going, lambda carry: decoding.step(model, how, carry), carry)


def _show(carry: Carry, shown: np.ndarray, on_tokens: OnTokens) -> np.ndarray:
    counts, tokens = np.asarray(carry.counts), np.asarray(carry.tokens)
    new = [row[a:b].tolist() for row, a, b in zip(tokens, shown, counts, strict=True)]
    if any(new):
        on_tokens(new)
    return counts.astype(np.int64)
