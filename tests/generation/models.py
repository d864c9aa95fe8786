# SPDX-License-Identifier: Apache-2.0
"""A small model whose greedy text is varied, and of which no choice is near a tie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv

VOCAB = 11
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7], [4, 4, 4, 4, 4, 4]]


@functools.cache
def model(seed: int = 11, vocab: int = VOCAB, noise: float = 0.0) -> jaxkv.Decoder:
    """Makes a model whose output matrix is its own, so that it does not repeat its input."""
    factory = functools.partial(jaxkv.GroupedQueryAttention, num_heads=2, rotary=jaxkv.Rotary())
    made = jaxkv.Decoder(vocab, 16, 1, factory, tied=False, rngs=nnx.Rngs(seed))
    assert made.head is not None
    kernel = made.head.kernel[...]
    other = jax.random.normal(jax.random.key(seed), kernel.shape)
    made.head.kernel[...] = 4 * (kernel + noise * other)
    return made


@jax.jit
def _forward(decoder: jaxkv.Decoder, row: jax.Array, **context: Any) -> jax.Array:
    return jax.nn.log_softmax(decoder(row, **context)[0].astype(jnp.float32))


def scores(decoder: jaxkv.Decoder, tokens: list[int], **context: Any) -> np.ndarray:
    """Gives log-probabilities `[len(tokens), vocab]` without a cache, in one padded shape."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_forward(decoder, jnp.asarray(row), **context))[0, : len(tokens)]


def check_cache(decoder: jaxkv.Decoder, made: jaxkv.Generation, texts: list[list[int]]) -> None:
    """Checks that a cache holds each row's text but the pending token, by what follows it."""
    assert made.cache.lengths.tolist() == [len(text) - 1 for text in texts]
    assert made.pending.tolist() == [text[-1] for text in texts]
    assert not np.any(made.cache.overflowed) and not np.any(made.cache.refused)
    got = np.asarray(_step(decoder, made.cache, made.pending[:, None]))
    for row, text in zip(got, texts, strict=True):
        np.testing.assert_allclose(row, scores(decoder, text)[-1], rtol=0, atol=1e-4)


@jax.jit
def _step(decoder: jaxkv.Decoder, cache: Any, tokens: jax.Array) -> jax.Array:
    logits, _ = decoder(tokens, cache=cache)
    return jax.nn.log_softmax(logits[:, 0].astype(jnp.float32))
