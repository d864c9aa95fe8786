# SPDX-License-Identifier: Apache-2.0
"""The optimiser against AdamW's paper, its schedule, and what it shrinks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.training import TrainConfig, parameters
from jaxkv.training.optimiser import decays, optimiser, schedule
from tests.training.tiny import decoder

RNG = np.random.default_rng(2)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_updates_are_adamw_with_clipping_and_decay_on_kernels(clip: float | None) -> None:
    config = TrainConfig(
        steps=9, learning_rate=0.1, warmup=2, weight_decay=0.3, beta1=0.8, beta2=0.9, clip=clip
    )
    params = {"kernel": RNG.normal(size=(3, 2)), "bias": RNG.normal(size=(3, 2))}
    state = optimiser(config).init(jax.tree.map(jnp.float32, params))
    mean = {name: np.zeros((3, 2)) for name in params}
    square = {name: np.zeros((3, 2)) for name in params}
    for step in range(5):
        # Steps of very different size: Adam forgets the size of equal ones.
        grads = {name: 10.0 ** (step % 3 - 1) * RNG.normal(size=(3, 2)) for name in params}
        given = jax.tree.map(jnp.float32, grads)
        updates, state = optimiser(config).update(given, state, jax.tree.map(jnp.float32, params))
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        rate = float(schedule(config)(step))
        for name, grad in grads.items():
            clipped = factor * grad
            mean[name] = 0.8 * mean[name] + 0.2 * clipped
            square[name] = 0.9 * square[name] + 0.1 * clipped**2
            unbiased = mean[name] / (1 - 0.8 ** (step + 1))
            scale = np.sqrt(square[name] / (1 - 0.9 ** (step + 1))) + 1e-8
            decay = 0.3 * params[name] if name == "kernel" else 0.0
            want = -rate * (unbiased / scale + decay)
            np.testing.assert_allclose(updates[name], want, rtol=2e-5)
            params[name] = params[name] + want


def test_learning_rate_rises_and_falls_as_it_should() -> None:
    config = TrainConfig(steps=100, warmup=10, learning_rate=0.02, final_ratio=0.1)
    rate = schedule(config)
    for step in range(101):
        if step < 10:
            want = 0.002 + (0.02 - 0.002) * step / 10
        else:
            share = 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
            want = 0.02 * (0.1 + 0.9 * share)
        assert float(rate(step)) == pytest.approx(want, rel=1e-5), step
    assert float(schedule(TrainConfig(steps=5, learning_rate=0.5))(0)) == 0.5


def test_only_kernels_decay() -> None:
    model = decoder(norm="layer", use_bias=True, tied=False, max_positions=8)
    marks = jax.tree_util.tree_leaves_with_path(decays(parameters(model)))
    names = {".".join(str(key.key) for key in path): mark for path, mark in marks}
    decayed = {name for name, mark in names.items() if mark}
    block = "blocks.0."
    assert decayed == {
        *(f"{block}attention.{name}.kernel" for name in ("query", "key", "value", "out")),
        *(f"{block}mlp.{name}.kernel" for name in ("up", "down")),
        "head.kernel",
    }
    assert {name.split(".")[-1] for name in set(names) - decayed} == {
        "bias",
        "scale",
        "embedding",
        "position_embedding",
    }


def test_biases_with_a_head_axis_do_not_decay() -> None:
    assert decays({"query": {"bias": jnp.zeros((2, 4)), "kernel": jnp.zeros((8, 2, 4))}}) == {
        "query": {"bias": False, "kernel": True}
    }


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "steps=0: want at least 1"),
        ("eval_every", 0, "eval_every=0: want at least 1"),
        ("save_every", -1, "save_every=-1"),
        ("accumulate", 3, "batch=16 does not divide into 3 parts"),
        ("warmup", 10, "warmup=10: want 0 <= warmup < steps=10"),
        ("final_ratio", 1.5, "final_ratio=1.5: want 0 to 1"),
        ("beta2", -0.1, "beta2=-0.1"),
        ("learning_rate", 0.0, "learning_rate=0.0"),
        ("clip", 0.0, "clip=0.0: want more than 0, or None"),
    ],
)
def test_configs_that_cannot_be_are_refused(field: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**{"steps": 10, field: value})
