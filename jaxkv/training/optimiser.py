# SPDX-License-Identifier: Apache-2.0
"""AdamW with warm-up, cosine, clipping, and weight decay on kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxkv.training.config import TrainConfig

UNDECAYED = ("bias", "scale", "embedding", "position_embedding", "sink_logits")


def schedule(config: TrainConfig) -> optax.Schedule:
    """Makes the learning rate of each step: a linear rise, then a cosine.

    The first step already moves: it has `1 / warmup` of the largest rate, not 0.

    >>> rate = schedule(TrainConfig(steps=6, warmup=2, learning_rate=1.0, final_ratio=0.0))
    >>> [round(float(rate(step)), 2) for step in range(7)]
    [0.5, 0.75, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    peak = config.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        init_value=peak / max(config.warmup, 1),
        peak_value=peak,
        warmup_steps=config.warmup,
        decay_steps=config.steps,
        end_value=peak * config.final_ratio,
    )
    return lambda step: _relaxed(rate, step)


def decays(params: Any) -> Any:
    """Marks the parameters that weight decay shrinks: no norms, biases, sinks or embeddings."""

    def one(path: tuple[Any, ...], value: Any) -> bool:
        name = getattr(path[-1], "key", None)
        return value.ndim > 1 and name not in UNDECAYED

    return jax.tree_util.tree_map_with_path(one, params)


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimiser of a run.

    Source: AdamW, arXiv:1711.05101, algorithm 2.
    """
    # The identity keeps a state as clipping does, so a run can go on with clipping switched.
    clip = optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip)
    adamw = optax.adamw(
        schedule(config),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decays,
    )
    inner = optax.chain(clip, adamw)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return _relaxed(inner.update, updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def _relaxed(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls Optax, which raises a float to an integer array, under a strict `jax.config` too."""
    with jax.numpy_dtype_promotion("standard"):
        return fn(*args)
