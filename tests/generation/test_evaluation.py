# SPDX-License-Identifier: Apache-2.0
"""The loss through a cache against plain scoring without one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.generation.evaluation import evaluate

FACTORY = functools.partial(jaxkv.GroupedQueryAttention, num_heads=4, rotary=jaxkv.Rotary())
TOKENS = np.random.default_rng(0).integers(31, size=100).astype(np.int32)


@functools.cache
def model() -> jaxkv.Decoder:
    return jaxkv.Decoder(31, 16, 2, FACTORY, rngs=nnx.Rngs(0))


@jax.jit
def score(scored: jaxkv.Decoder, row: jax.Array) -> jax.Array:
    return scored(row)[0]


def plain(scored: jaxkv.Decoder, context: int) -> float:
    """Scores whole pieces in float64, without a cache."""
    losses = []
    for start in range(0, (TOKENS.size - 1) // context * context, context):
        row = TOKENS[start : start + context]
        logits = np.asarray(score(scored, row[None])[0], np.float64)
        wanted = TOKENS[start + 1 : start + context + 1]
        norm = np.log(np.exp(logits).sum(-1))
        losses += (norm - logits[np.arange(context), wanted]).tolist()
    return float(np.mean(losses))


@pytest.mark.parametrize(("context", "chunk", "rows"), [(12, 4, 3), (12, 12, 8), (33, 11, 2)])
def test_the_loss_is_that_of_scoring_piece_by_piece(context: int, chunk: int, rows: int) -> None:
    shares: list[float] = []
    found = evaluate(model(), TOKENS, context=context, chunk=chunk, rows=rows, report=shares.append)
    assert abs(found.loss - plain(model(), context)) < 1e-5
    assert found.tokens == 99 // context * context
    assert abs(found.perplexity - np.exp(found.loss)) < 1e-6
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert found.bytes_per_token == 2 * 2 * 2 * 4 * 4


def test_a_ring_costs_what_a_window_costs() -> None:
    windowed = jaxkv.Decoder(31, 16, 2, functools.partial(FACTORY, window=5), rngs=nnx.Rngs(0))

    def ring(rows: int, capacity: int) -> jaxkv.ModelCache:
        return model().init_cache(rows, capacity, layout=jaxkv.Ring(5))

    found = evaluate(model(), TOKENS, context=24, chunk=8, make_cache=ring)
    assert abs(found.loss - plain(windowed, 24)) < 1e-5
    assert abs(found.loss - plain(model(), 24)) > 1e-4
    # Five slots for 24 tokens.
    assert found.bytes_per_token == 2 * 2 * 2 * 4 * 4 * 5 / 24


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="context 10 in chunks of 4: want a multiple"):
        evaluate(model(), TOKENS, context=10, chunk=4)
    with pytest.raises(ValueError, match="100 tokens: want at least 129"):
        evaluate(model(), TOKENS, context=128)
    with pytest.raises(ValueError, match="the cache dropped tokens"):
        evaluate(
            model(), TOKENS, context=64, make_cache=lambda rows, n: model().init_cache(rows, 32)
        )
    assert jnp.isfinite(evaluate(model(), TOKENS, context=64).loss)
