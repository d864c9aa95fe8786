# SPDX-License-Identifier: Apache-2.0
"""How fast and how well a model decodes from a cache, and how far its logits are off."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxkv.cache.model_cache import ModelCache
from jaxkv.models.decoder import Decoder


class Decoding(NamedTuple):
    """What was measured of a model's decode steps.

    Attributes:
      gap: Largest absolute difference between logits of decoding one by one and those asked for.
      rates: Batch -> decoded tokens per second, all rows together.
      loss: Cross entropy of the text's second half, nats per token; nan of a single token.
      logits: float32 `[T, vocab]`, those of decoding one by one.
    """

    gap: float
    rates: dict[int, float]
    loss: float
    logits: jax.Array


def measure_decoding(
    model: Decoder,
    tokens: np.ndarray,
    *,
    batches: Sequence[int] = (1, 8),
    steps: int = 64,
    repeats: int = 3,
    prompt: int = 0,
    make_cache: Callable[[int, int], ModelCache] | None = None,
    against: jax.Array | None = None,
    report: Callable[[str], None] = lambda what: None,
) -> Decoding:
    """Decodes a text token by token, compares the logits, then times more steps on top of it.

    Args:
      model: The language model.
      tokens: int32 `[T]`, the text; it is in the cache of every row when a step is timed.
      batches: Numbers of rows to time.
      steps: Decode steps of one compiled loop; divides T less the prompt. Choosing tokens is not
        part of them.
      repeats: Timed loops; the fastest counts, since a shared machine only ever adds time.
      prompt: Tokens of the text that come in one call before the others.
      make_cache: Called with rows and their capacity in tokens; default the model's own cache.
      against: `[T, vocab]`, logits to compare with; default those without a cache.
      report: Called with what is being done.

    Raises:
      ValueError: If `steps` does not divide what follows the prompt, `against` is of another
        shape, or the cache drops tokens.
    """
    T = tokens.size
    if not 0 <= prompt < max(T, 1):
        raise ValueError(f"a prompt of {prompt} of {T} tokens: want fewer than all.")
    if T == 0 or (T - prompt) % steps:
        raise ValueError(f"{T - prompt} tokens in loops of {steps} steps: want a multiple.")
    if against is not None and against.shape != (T, model.vocab):
        raise ValueError(f"against {against.shape}: want {(T, model.vocab)}.")
    graph, state = nnx.split(model)
    row, capacity = jnp.asarray(tokens, jnp.int32)[None], T + steps * (repeats + 1)
    fed, whole = (functools.partial(fn, graph, nnx.as_pure(state)) for fn in (_fed, _whole))

    def fill(rows: int, tokens: jax.Array) -> tuple[jax.Array, ModelCache]:
        parts, cache = [], (make_cache or model.init_cache)(rows, capacity)
        cuts = [*([0] if prompt else []), *range(prompt, T, steps)]
        for start, end in itertools.pairwise((*cuts, T)):
            logits, cache = (fed if start >= prompt else whole)(cache, tokens[:, start:end])
            parts.append(logits)
        return jnp.concatenate(parts, axis=1), cache

    report("decoding one by one")
    logits, cache = fill(1, row)
    want = against
    if want is None:
        report("comparing cached with uncached logits")
        want = _uncached(graph, nnx.as_pure(state), row)[0]
    gap = float(jnp.max(jnp.abs(logits[0] - want)))
    rates = {}
    for batch in batches:
        report(f"timing decode, batch {batch}")
        many = jnp.tile(row, (batch, 1))
        if make_cache is None:
            rows = cache.fork(jnp.zeros((batch,), jnp.int32))
        else:  # forks of a row on pages would share them, and the row's pool has no room for more
            _, rows = fill(batch, many)
        rates[batch] = _rate(fed, rows, many[:, :steps], repeats)
    return Decoding(gap, rates, _late_loss(logits[0], tokens), logits[0])


def _late_loss(logits: jax.Array, tokens: np.ndarray) -> float:
    """Averages the cross entropy of the second half of a text, each token given all before it."""
    first = max(tokens.size // 2, 1)
    if tokens.size == 1:
        return math.nan
    scores = np.asarray(logits, np.float64)[first - 1 : -1]
    scores -= scores.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(scores, tokens[first:, None], axis=-1)[:, 0]
    return float(np.mean(np.log(np.exp(scores).sum(axis=-1)) - chosen))


def _rate(fed: Callable[..., Any], cache: ModelCache, tokens: jax.Array, repeats: int) -> float:
    _, cache = jax.block_until_ready(fed(cache, tokens))  # compiles
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(fed(cache, tokens))
        best = min(best, time.perf_counter() - start)
    if np.any(cache.overflowed):
        raise ValueError(f"the cache dropped tokens, so its steps were not timed: {cache}.")
    return tokens.size / best


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _fed(
    graph: Any, state: Any, cache: ModelCache, tokens: jax.Array
) -> tuple[jax.Array, ModelCache]:
    """Decodes given tokens `[B, T]` one by one: logits float32 `[B, T, vocab]`."""
    model = nnx.merge(graph, state)

    def step(cache: ModelCache, token: jax.Array) -> tuple[ModelCache, jax.Array]:
        logits, cache = model(token[:, None], cache=cache)
        return cache, logits[:, 0].astype(jnp.float32)

    cache, logits = lax.scan(step, cache, tokens.T)
    return logits.swapaxes(0, 1), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _whole(
    graph: Any, state: Any, cache: ModelCache, tokens: jax.Array
) -> tuple[jax.Array, ModelCache]:
    """Reads given tokens `[B, T]` in one call: logits float32 `[B, T, vocab]`."""
    logits, cache = nnx.merge(graph, state)(tokens, cache=cache)
    return logits.astype(jnp.float32), cache


@functools.partial(jax.jit, static_argnums=0)
def _uncached(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    return nnx.merge(graph, state)(tokens)[0].astype(jnp.float32)
