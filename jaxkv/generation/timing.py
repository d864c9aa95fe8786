# SPDX-License-Identifier: Apache-2.0
"""How fast a model decodes from its cache, and how far its logits are from uncached ones."""

from __future__ import annotations

import functools
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
      gap: Largest absolute difference between uncached logits and those of decoding one by one.
      rates: Batch -> decoded tokens per second, all rows together.
    """

    gap: float
    rates: dict[int, float]


def measure_decoding(
    model: Decoder,
    tokens: np.ndarray,
    *,
    batches: Sequence[int] = (1, 8),
    steps: int = 64,
    repeats: int = 3,
    report: Callable[[str], None] = lambda what: None,
) -> Decoding:
    """Decodes a text token by token, compares the logits, then times more steps on top of it.

    Args:
      model: The language model.
      tokens: int32 `[T]`, the text; it is in the cache of every row when a step is timed.
      batches: Numbers of rows to time.
      steps: Decode steps of one compiled loop; divides T. Choosing tokens is not part of them.
      repeats: Timed loops; the fastest counts, since a shared machine only ever adds time.
      report: Called with what is being done.

    Raises:
      ValueError: If `steps` does not divide T.
    """
    T = tokens.size
    if T == 0 or T % steps:
        raise ValueError(f"{T} tokens in loops of {steps} steps: want a multiple.")
    graph, state = nnx.split(model)
    fed = functools.partial(_fed, graph, nnx.as_pure(state))
    row = jnp.asarray(tokens, jnp.int32)[None]
    report("decoding one by one")
    cache = model.init_cache(1, T + steps * (repeats + 1))
    parts = []
    for start in range(0, T, steps):
        logits, cache = fed(cache, row[:, start : start + steps])
        parts.append(logits)
    report("comparing cached with uncached logits")
    want = _uncached(graph, nnx.as_pure(state), row)
    gap = float(jnp.max(jnp.abs(jnp.concatenate(parts, axis=1) - want)))
    rates = {}
    for batch in batches:
        report(f"timing decode, batch {batch}")
        rows = cache.fork(jnp.zeros((batch,), jnp.int32))
        rates[batch] = _rate(fed, rows, jnp.tile(row[:, :steps], (batch, 1)), repeats)
    return Decoding(gap, rates)


def _rate(fed: Callable[..., Any], cache: ModelCache, tokens: jax.Array, repeats: int) -> float:
    _, cache = jax.block_until_ready(fed(cache, tokens))  # compiles
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(fed(cache, tokens))
        best = min(best, time.perf_counter() - start)
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


@functools.partial(jax.jit, static_argnums=0)
def _uncached(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    return nnx.merge(graph, state)(tokens)[0].astype(jnp.float32)
