# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jaxkv.training.batch import Batch
from jaxkv.training.loss import next_token_loss
from jaxkv.training.optimiser import schedule
from jaxkv.training.state import Program, TrainState

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def train_step(program: Program) -> TrainStep:
    """Makes the function of one step, to be given to `jax.jit` with the state donated.

    Args:
      program: The model, its optimiser and the run's config.

    Returns:
      `(state, batch) -> (state, metrics)`. The batch has a leading axis of parts, `[A, B, T + 1]`
      (see `Batch.in_parts`), which are computed one after the other. Metrics are scalars: `loss`
      (mean over the wanted tokens), `grad_norm` (before clipping), `learning_rate`, `tokens`.
    """
    rate = schedule(program.config)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        total, count, grads = summed_gradient(program, state.params, batch, key)
        # A batch without a wanted token has loss and gradient 0.
        divisor = jnp.maximum(count, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / divisor, grads)
        updates, opt_state = program.optimiser.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": total / divisor,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(rate(state.step), jnp.float32),
            "tokens": count,
        }
        parts, rows = batch.tokens.shape[:2]
        return TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            cursor=state.cursor + parts * rows,
            key=state.key,
        ), metrics

    return run


def summed_gradient(
    program: Program, params: Any, batch: Batch, key: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Sums loss, count and gradient over the parts of a batch `[A, B, T + 1]`.

    Sums, not means: parts with different numbers of wanted tokens then weigh what they should.
    """

    def loss(params: Any, part: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = program.model(params)(
            part.inputs,
            segment_ids=part.input_segments,
            deterministic=False,
            rngs=nnx.Rngs(dropout=key),
        )
        return next_token_loss(logits, part)

    gradient = jax.value_and_grad(loss, has_aux=True)
    parts = batch.tokens.shape[0]
    if parts == 1:
        (total, count), grads = gradient(params, jax.tree.map(lambda x: x[0], batch), key)
        return total, count, grads

    def add(sums: Any, given: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        part, number = given
        (total, count), grads = gradient(params, part, jax.random.fold_in(key, number))
        return jax.tree.map(jnp.add, sums, (total, count, grads)), None

    zeros = (jnp.zeros(()), jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
    sums, _ = lax.scan(add, zeros, (batch, jnp.arange(parts)))
    return sums


def eval_step(program: Program) -> EvalStep:
    """Makes the function of one evaluation step, to be given to `jax.jit`.

    Returns:
      `(params, batch) -> (sum, count)` of the loss without dropout; the batch is `[B, T + 1]`.
    """

    def run(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits, _ = program.model(params)(batch.inputs, segment_ids=batch.input_segments)
        return next_token_loss(logits, batch)

    return run
