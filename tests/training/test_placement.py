# SPDX-License-Identifier: Apache-2.0
"""Meshes: where things lie, and that a step does the same everywhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxkv.attention import GroupedQueryAttention
from jaxkv.core.rotary import Rotary
from jaxkv.core.sharding import Rules
from jaxkv.models.decoder import Decoder
from jaxkv.training import (
    PackedData,
    Program,
    TrainConfig,
    TrainState,
    eval_step,
    init_sharded,
    parameters,
    shardings,
    train,
    train_step,
)
from jaxkv.training.placement import place_batch, place_state
from tests.training.tiny import Bigram

DATA = PackedData([bytes(97 + (n + i) % 7 for i in range(3 + n % 11)) for n in range(400)])
CONFIG = TrainConfig(steps=4, batch=16, length=12, accumulate=2, learning_rate=1e-3)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(kind: AxisType, shape: tuple[int, int]) -> Mesh:
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(kind,) * 2)


def sharded_decoder(**options: Any) -> Decoder:
    """Makes a decoder whose every axis of interest divides over eight devices."""
    attention = functools.partial(
        GroupedQueryAttention, num_heads=8, head_dim=2, rotary=Rotary(1e4)
    )
    options = {"mlp_features": 32, "gated": False} | options
    return Decoder(256, 16, 1, attention, rngs=nnx.Rngs(0), **options)


@functools.cache
def started() -> tuple[Program, TrainState]:
    model = sharded_decoder(tied=False, max_positions=12)
    program = Program.of(model, CONFIG)
    return program, program.init(parameters(model))


def two_steps(mesh: Mesh | None) -> tuple[Any, ...]:
    """Trains two steps of two parts each, and evaluates."""
    program, start = started()
    state = place_state(program, jax.tree.map(jnp.copy, start), mesh)
    out = None if mesh is None else (shardings(program, state, mesh), None)
    step = jax.jit(train_step(program), donate_argnums=0, out_shardings=out)
    for number in range(2):
        batch = DATA.train_batch(16 * number, batch=16, length=12, seed=0).in_parts(2)
        state, metrics = step(state, place_batch(batch, mesh))
    held = DATA.validation_batches(1, batch=8, length=12)[0]
    loss, count = jax.jit(eval_step(program))(state.params, place_batch(held, mesh))
    return state.params, metrics, loss / count.astype(jnp.float32)


@pytest.fixture(scope="module")
def unsharded() -> tuple[Any, ...]:
    return jax.tree.map(np.asarray, two_steps(None))


# A step of each shape, and of each kind; the other pairs take as long and run in full.
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(AUTO, (8, 1), id="auto-8x1", marks=pytest.mark.full),
        pytest.param(AUTO, (2, 4), id="auto-2x4"),
        pytest.param(AUTO, (1, 8), id="auto-1x8", marks=pytest.mark.full),
        pytest.param(EXPLICIT, (8, 1), id="explicit-8x1"),
        pytest.param(EXPLICIT, (2, 4), id="explicit-2x4", marks=pytest.mark.full),
        pytest.param(EXPLICIT, (1, 8), id="explicit-1x8", marks=pytest.mark.full),
    ],
)
def test_sharded_steps_equal_unsharded_ones(
    kind: AxisType, shape: tuple[int, int], unsharded: tuple[Any, ...]
) -> None:
    mesh = mesh_of(kind, shape)
    with jax.set_mesh(mesh):
        sharded = two_steps(mesh)
    table = sharded[0]["embedding"]
    assert table.sharding.spec[0] == "tensor"
    assert table.addressable_shards[0].data.shape == (256 // shape[1], 16)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.tree.map(np.asarray, sharded), unsharded)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_the_loop_finds_the_mesh(kind: AxisType) -> None:
    config = TrainConfig(steps=3, batch=8, length=12)
    alone = train(Bigram(rngs=nnx.Rngs(0)), DATA, config)
    with jax.set_mesh(mesh_of(kind, (8, 1))):
        model = Bigram(rngs=nnx.Rngs(0))
        result = train(model, DATA, config)
    assert len(result.model.kernel[...].sharding.device_set) == 8
    np.testing.assert_allclose(result.model.kernel[...], alone.model.kernel[...], atol=1e-5)
    assert result.validation_loss == pytest.approx(alone.validation_loss, rel=1e-5)


def test_optimiser_state_lies_with_its_parameter() -> None:
    mesh = mesh_of(AUTO, (2, 4))
    model = nnx.eval_shape(lambda: sharded_decoder(norm="layer", use_bias=True))
    program = Program.of(model, CONFIG)
    state = jax.eval_shape(program.init, parameters(model))
    places = shardings(program, state, mesh)
    assert jax.tree.structure(places) == jax.tree.structure(state)
    block = places.params["blocks"][0]
    specs = {
        "query": block["attention"]["query"]["kernel"].spec,
        "out": block["attention"]["out"]["kernel"].spec,
        "up": block["mlp"]["up"]["kernel"].spec,
        "down": block["mlp"]["down"]["kernel"].spec,
        "embedding": places.params["embedding"].spec,
        "norm": places.params["norm"]["scale"].spec,
    }
    assert {name: tuple(spec) for name, spec in specs.items()} == {
        "query": (None, "tensor", None),
        "out": ("tensor", None, None),
        "up": (None, "tensor"),
        "down": ("tensor", None),
        "embedding": ("tensor", None),
        "norm": (None,),
    }
    moments = [
        node
        for node in jax.tree.leaves(places.opt_state, is_leaf=lambda n: hasattr(n, "mu"))
        if hasattr(node, "mu")
    ]
    assert len(moments) == 1
    assert moments[0].mu == moments[0].nu == places.params
    assert places.step.spec == moments[0].count.spec == PartitionSpec()
    wide = shardings(program, state, mesh, Rules((("embed", "data"),)))
    assert wide.params["embedding"].spec == PartitionSpec(None, "data")


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_no_device_ever_holds_the_whole_model(
    kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = functools.partial(sharded_decoder, mlp_features=4096)
    whole = parameters(make())
    peaks = []
    jit = jax.jit

    def measured(fn: Any, **options: Any) -> Any:
        def run() -> Any:
            compiled = jit(fn, **options).lower().compile()
            memory = compiled.memory_analysis()
            peaks.append(memory.temp_size_in_bytes + memory.output_size_in_bytes)
            return compiled()

        return run

    mesh = mesh_of(kind, (1, 8))
    with jax.set_mesh(mesh), monkeypatch.context() as patch:
        patch.setattr(jax, "jit", measured)
        model = init_sharded(make, mesh)
    drawn = parameters(model)
    # Drawn in one program instead of many, which rounds otherwise.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), drawn, whole)
    kernel = drawn["blocks"][0]["mlp"]["up"]["kernel"]
    assert kernel.sharding.mesh.axis_types == (kind,) * 2
    assert kernel.addressable_shards[0].data.shape == (16, 512)
    assert len(peaks) == 1
    assert peaks[0] < sum(x.nbytes for x in jax.tree.leaves(whole)) / 2


def test_rows_lie_over_the_data_axis() -> None:
    mesh = mesh_of(AUTO, (4, 2))
    batch = DATA.train_batch(0, batch=16, length=12, seed=0)
    for given, place in ((batch, ("data", None)), (batch.in_parts(2), (None, "data", None))):
        placed = place_batch(given, mesh)
        assert {tuple(x.sharding.spec) for x in jax.tree.leaves(placed)} == {place}
    assert isinstance(place_batch(batch, None).tokens, jnp.ndarray)
