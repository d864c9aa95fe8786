# SPDX-License-Identifier: Apache-2.0
"""One step: accumulation, formats, dropout, donation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention, MultiHeadLatentAttention
from jaxkv.core.numerics import Numerics
from jaxkv.training import (
    Batch,
    PackedData,
    Program,
    TrainConfig,
    eval_step,
    parameters,
    train_step,
)
from jaxkv.training.loss import wanted_targets
from jaxkv.training.step import summed_gradient
from tests.training.tiny import Bigram, decoder

RNG = np.random.default_rng(3)


def random_batch(rows: int, length: int) -> Batch:
    return Batch(jnp.asarray(RNG.integers(0, 250, (rows, length + 1)), jnp.int32))


def started(model: nnx.Module, **config: Any) -> tuple[Program, Any, Any]:
    """Makes a program, its first state and its compiled step."""
    program = Program.of(model, TrainConfig(**{"steps": 10} | config))
    state = program.init(parameters(model))
    return program, state, jax.jit(train_step(program), donate_argnums=0)


def test_parts_add_up_to_the_big_batch() -> None:
    # Packed rows: the parts have unequal numbers of wanted tokens, so means would not add up.
    data = PackedData([b"abcdefgh"[: 2 + n % 7] for n in range(60)])
    batch = data.train_batch(0, batch=8, length=9, seed=0)
    wanted = wanted_targets(jax.tree.map(jnp.asarray, batch)).reshape(4, -1).sum(axis=1)
    assert len(set(wanted.tolist())) > 1
    results = []
    for parts in (1, 4):
        program, state, step = started(Bigram(rngs=nnx.Rngs(0)), clip=None)
        gradient = jax.jit(functools.partial(summed_gradient, program))
        sums = gradient(state.params, batch.in_parts(parts), state.key)
        new, metrics = step(state, batch.in_parts(parts))
        results.append((sums, metrics, int(new.cursor)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)
    assert results[0][2] == 8


def test_metrics_are_those_of_the_mean_loss() -> None:
    program, state, step = started(Bigram(rngs=nnx.Rngs(0)), learning_rate=0.3, warmup=3)
    batch = random_batch(2, 5).in_parts(1)
    total, count, grads = summed_gradient(program, state.params, batch, state.key)
    squares = sum(float(jnp.sum((g / 10) ** 2)) for g in jax.tree.leaves(grads))
    _, metrics = step(state, batch)
    assert int(count) == int(metrics["tokens"]) == 10
    assert float(metrics["loss"]) == pytest.approx(float(total) / 10)
    assert float(metrics["grad_norm"]) == pytest.approx(squares**0.5, rel=1e-5)
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)


def test_bfloat16_computes_and_float32_remembers() -> None:
    model = decoder(numerics=Numerics(dtype=jnp.bfloat16))
    program, state, step = started(model, learning_rate=1e-5, warmup=0)
    batch = random_batch(2, 8)
    logits = jax.eval_shape(lambda p: program.model(p)(batch.inputs)[0], state.params)
    hidden = jax.eval_shape(lambda p: program.model(p).hidden(batch.inputs)[0], state.params)
    assert logits.dtype == hidden.dtype == jnp.bfloat16
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, batch.in_parts(1))
    floats = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert metrics["loss"].dtype == jnp.float32
    # An update far below bfloat16's resolution is kept.
    kernel = before["blocks"][0]["mlp"]["up"]["kernel"]
    moved = np.asarray(state.params["blocks"][0]["mlp"]["up"]["kernel"]) - kernel
    assert 0 < np.abs(moved).max() < 2e-5


def test_bfloat16_parameters_get_float32_masters() -> None:
    model = decoder(numerics=Numerics(param_dtype=jnp.bfloat16))
    program, state, _ = started(model)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    hidden = jax.eval_shape(
        lambda p: program.model(p).hidden(jnp.zeros((1, 4), jnp.int32))[0], state.params
    )
    assert hidden.dtype == jnp.bfloat16


def test_each_step_and_part_drops_other_units() -> None:
    program, state, step = started(Bigram(rngs=nnx.Rngs(0), dropout_rate=0.5))
    same = Batch(jnp.tile(random_batch(1, 20).tokens, (2, 1)))
    loss = jax.jit(functools.partial(summed_gradient, program))
    whole = loss(state.params, same.in_parts(2), state.key)[0]
    one, two = (
        loss(state.params, Batch(same.tokens[:1]).in_parts(1), jax.random.fold_in(state.key, part))[
            0
        ]
        for part in (0, 1)
    )
    assert float(one) != float(two)
    assert float(whole) == pytest.approx(float(one + two))
    losses = []
    for number, seed in ((0, 0), (0, 0), (1, 0), (0, 1)):
        other = dataclasses.replace(program, config=TrainConfig(steps=10, seed=seed))
        at = dataclasses.replace(other.init(state.params), step=jnp.int32(number))
        losses.append(float(step(at, same.in_parts(1))[1]["loss"]))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_evaluation_drops_nothing() -> None:
    plain, dropping = (Bigram(rngs=nnx.Rngs(0), dropout_rate=rate) for rate in (0.0, 0.5))
    batch = random_batch(2, 6)
    losses = [eval_step(started(model)[0])(parameters(model), batch) for model in (plain, dropping)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("variant", [GroupedQueryAttention, MultiHeadLatentAttention])
def test_drp_03_modules_drop_and_keep_the_mean(variant: Any) -> None:
    attention = variant(8, 2, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = jnp.asarray(0.3 * RNG.normal(size=(1, 4, 8)), jnp.float32)
    plain, _ = attention(x)

    def dropped(key: jax.Array) -> jax.Array:
        return attention(x, deterministic=False, rngs=nnx.Rngs(dropout=key))[0]

    many = jax.jit(jax.vmap(dropped))(jax.random.split(jax.random.key(0), 2000))
    assert not np.allclose(many[0], many[1])
    error = many.std(axis=0) / 2000**0.5
    assert np.all(np.abs(many.mean(axis=0) - plain) < 5 * error)
    # Of values of size 1 this is what a mean over so many keys can tell.
    assert 0 < error.max() < 0.05


def test_decoder_drops_in_every_place() -> None:
    tokens = random_batch(1, 6).inputs
    for options in ({"dropout_rate": 0.5}, {"attention_dropout": 0.5}):
        model = decoder(**options)
        plain, _ = model(tokens)
        one, two = (
            model(tokens, deterministic=False, rngs=nnx.Rngs(dropout=seed))[0] for seed in (1, 2)
        )
        assert not np.allclose(one, two)
        assert not np.allclose(one, plain)
    with pytest.raises(ValueError, match="needs rngs"):
        model(tokens, deterministic=False)


def test_state_is_updated_in_place_and_the_model_left_alone() -> None:
    model = Bigram(rngs=nnx.Rngs(0))
    _, state, step = started(model)
    batch = random_batch(2, 5).in_parts(1)
    compiled = step.lower(state, batch).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert compiled.alias_size_in_bytes >= size
    step(state, batch)
    assert np.isfinite(model.kernel[...]).all()


def test_models_with_other_arrays_are_refused() -> None:
    model = Bigram(rngs=nnx.Rngs(0))
    model.count = nnx.BatchStat(jnp.zeros(3))
    with pytest.raises(ValueError, match="holds count, which is no nnx.Param"):
        Program.of(model, TrainConfig(steps=1))
