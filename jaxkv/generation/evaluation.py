# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts a text when it remembers through a given cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache.model_cache import ModelCache
from jaxkv.cache.records import tree_bytes
from jaxkv.core.trees import check_sizes
from jaxkv.models.decoder import Decoder


class Evaluation(NamedTuple):
    """What was measured of a text.

    Attributes:
      loss: Mean cross entropy, nats per token; its exponential is the perplexity.
      tokens: Tokens that were predicted.
      bytes_per_token: Of live records of all layers, over the tokens that a row is given.
    """

    loss: float
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return float(np.exp(self.loss))


def evaluate(
    model: Decoder,
    tokens: np.ndarray,
    *,
    context: int,
    rows: int = 8,
    chunk: int = 64,
    make_cache: Callable[[int, int], ModelCache] | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Predicts each token of a text from those before it, as the cache remembers them.

    The text is cut into pieces of `context` tokens, each begun with an empty cache and given
    `chunk` tokens a call; with float32 records the result does not depend on `chunk`.

    Args:
      model: The language model.
      tokens: int32 `[T]`; a last piece that is not whole is left out.
      context: Tokens of a piece.
      rows: Pieces that are read together.
      chunk: Tokens of a call; divides `context`.
      make_cache: Called with rows and their capacity in tokens; default the model's own cache.
      report: Called with the share that is done.

    Returns:
      The mean loss, nats per token.

    Raises:
      ValueError: If a size is below 1, `chunk` does not divide `context`, the text is too short,
        or the cache drops tokens.
    """
    check_sizes(context=context, rows=rows, chunk=chunk)
    if context % chunk:
        raise ValueError(f"context {context} in chunks of {chunk}: want a multiple.")
    pieces = (tokens.size - 1) // context
    if pieces < 1:
        raise ValueError(f"{tokens.size} tokens: want at least {context + 1}, one whole piece.")
    rows = min(rows, pieces)
    cut = np.arange(context)[None] + context * np.arange(pieces)[:, None]
    graph, state = nnx.split(model)
    score = functools.partial(_score, graph, nnx.as_pure(state))
    cache = (make_cache or model.init_cache)(rows, context)
    total, each = 0.0, kept_bytes(cache) / (rows * context)
    for start in range(0, pieces, rows):
        # The last pieces are moved back to fill the rows; those seen before count nothing.
        first = min(start, pieces - rows)
        place = cut[first : first + rows]
        counts = jnp.asarray(np.arange(first, first + rows) >= start, jnp.float32)
        cache = cache.reset()
        for begin in range(0, context, chunk):
            part = place[:, begin : begin + chunk]
            given = (jnp.asarray(tokens[part], jnp.int32), jnp.asarray(tokens[part + 1], jnp.int32))
            loss, cache = score(cache, *given, counts)
            total += float(loss)
        if np.any(cache.overflowed):
            raise ValueError(f"the cache dropped tokens: {cache}.")
        report((first + rows) / pieces)
    return Evaluation(total / (pieces * context), pieces * context, each)


def kept_bytes(cache: ModelCache) -> int:
    """Counts the bytes of all layers' records; block tables and lengths are not among them."""
    return sum(tree_bytes(layer) for layer in cache.layers)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score(
    graph: Any,
    state: Any,
    cache: ModelCache,
    tokens: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, ModelCache]:
    """Reads a chunk `[B, T]` and sums the losses of its targets over the rows that count."""
    logits, cache = nnx.merge(graph, state)(tokens, cache=cache)
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(losses * counts[:, None]), cache
