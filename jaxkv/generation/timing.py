# SPDX-License-Identifier: Apache-2.0
"""How fast a model decodes from its cache."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.generation.loop import Run
from jaxkv.models.decoder import Decoder


def decode_rate(
    model: Decoder, tokens: np.ndarray, *, batch: int, steps: int, repeats: int = 3
) -> float:
    """Measures decoded tokens per second, all rows together, after a warm-up.

    Args:
      model: The language model.
      tokens: int32 `[T]`, the prompt that every row holds before the first timed step.
      batch: B, rows decoded together.
      steps: Decode steps that are timed at once, in one program on the device.
      repeats: Timed runs; the fastest counts, since a shared machine only ever adds time.

    Returns:
      Tokens per second over all rows.
    """
    prompts = np.tile(tokens[None].astype(np.int32), (batch, 1))
    new = 2 + steps * repeats
    cache = model.init_cache(batch, tokens.size + new)
    running = Run(model, prompts, max_new_tokens=new, cache=cache)
    running.decode(1)  # compiles
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        running.decode(steps)
        best = min(best, time.perf_counter() - start)
    return batch * steps / best


def largest_cached_gap(
    model: Decoder, tokens: np.ndarray, *, prefill: int, capacity: int | None = None
) -> float:
    """Measures the largest difference between cached and uncached logits.

    Args:
      model: The language model.
      tokens: int32 `[T]`.
      prefill: Tokens given in the first call; the rest are decoded one by one.
      capacity: Of the cache; default T.

    Returns:
      The largest absolute difference over all positions and tokens.
    """
    row = jnp.asarray(tokens, jnp.int32)[None]
    want, _ = jax.jit(lambda m, t: m(t))(model, row)

    @jax.jit
    def cached(model: Decoder, row: jax.Array) -> jax.Array:
        cache = model.init_cache(1, capacity or row.shape[1])
        first, cache = model(row[:, :prefill], cache=cache)

        def step(cache: object, token: jax.Array) -> tuple[object, jax.Array]:
            logits, cache = model(token[None, None], cache=cache)  # type: ignore[arg-type]
            return cache, logits[:, 0]

        _, rest = jax.lax.scan(step, cache, row[0, prefill:])
        return jnp.concatenate([first, rest.swapaxes(0, 1)], axis=1)

    got = cached(model, row)
    return float(jnp.max(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))))
