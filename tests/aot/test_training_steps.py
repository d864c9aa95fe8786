# SPDX-License-Identifier: Apache-2.0
"""Training steps at full width and length, compiled for TPU chips."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.models.decoder import Decoder
from jaxkv.testing.aot import compile_for_tpu, tpu_mesh
from jaxkv.training.batch import Batch
from jaxkv.training.config import TrainConfig
from jaxkv.training.loss import next_token_loss
from jaxkv.training.placement import shardings
from jaxkv.training.state import Program, TrainState, parameters
from jaxkv.training.step import train_step
from tests.aot.programs import LENGTH, ROWS, decoder, tokens
from tests.aot.recorded import check_temporary_bytes

# Chips that a step is split over by heads: master weights, both moments and gradients of
# DeepSeek-V3's first two layers are 48 GB, and a v5e has 15.75 GiB.
CHIPS = {"mha": 4, "gqa": 4, "mqa": 4, "mla": 8}
NARROW = dict(vocab=1024, features=512, mlp_features=1024)


def placed_state(program: Program, model: Decoder, mesh: Mesh) -> TrainState:
    """Shapes of a training state and where its arrays lie."""
    state = jax.eval_shape(program.init, parameters(model))
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        shardings(program, state, mesh),
    )


def bytes_per_device(state: TrainState) -> int:
    """Counts one device's share of the parameters and moments, which are all float32."""
    leaves = [x for x in jax.tree.leaves(state) if x.ndim]
    assert {x.dtype for x in leaves} == {jnp.dtype(jnp.float32)}
    return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)


def compile_training(variant: str, chip: str, length: int, **sizes: int) -> tuple[Any, TrainState]:
    """Compiles the whole step, AdamW included, with a donated state."""
    mesh = tpu_mesh(chip, {"data": 1, "tensor": CHIPS[variant]})
    model = decoder(variant, param_dtype=jnp.float32, remat=True, **sizes)
    program = Program.of(model, TrainConfig(steps=100, warmup=10))
    state = placed_state(program, model, mesh)
    place = NamedSharding(mesh, PartitionSpec(None, "data"))
    batch = Batch(jax.ShapeDtypeStruct((1, ROWS, length + 1), jnp.int32, sharding=place))
    return compile_for_tpu(train_step(program), (state, batch), mesh, donate=0), state


@pytest.mark.full
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("variant", CHIPS)
def test_training_step_updates_its_state_in_place(variant: str, chip: str) -> None:
    compiled, state = compile_training(variant, chip, LENGTH)
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_per_device(state)
    check_temporary_bytes(compiled, "train", variant, chip)


@pytest.mark.parametrize("variant", ["gqa", pytest.param("mla", marks=pytest.mark.full)])
def test_narrow_training_step_updates_its_state_in_place(variant: str) -> None:
    # The heads are those of the real models; a full step takes minutes to compile.
    compiled, state = compile_training(variant, "v5e", 16, num_layers=1, **NARROW)
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_per_device(state)
    check_temporary_bytes(compiled, "train narrow", variant, "v5e")


@pytest.mark.full
@pytest.mark.parametrize(("variant", "chip"), [("gqa", "v5e"), ("gqa", "v6e"), ("mla", "v6e")])
def test_gradient_fits_one_chip(variant: str, chip: str) -> None:
    # A smaller vocabulary: master weights and gradients of 128,256 tokens alone are 12 GB.
    model = decoder(variant, param_dtype=jnp.float32, remat=True, vocab=32_000)
    graphdef, state = nnx.split(model)

    def loss(state: Any, given: Any) -> Any:
        batch = Batch(given)
        total, count = next_token_loss(nnx.merge(graphdef, state)(batch.inputs)[0], batch)
        return total / count.astype(jnp.float32)

    args = (state, tokens(ROWS, LENGTH + 1))
    compiled = compile_for_tpu(jax.value_and_grad(loss), args, tpu_mesh(chip))
    check_temporary_bytes(compiled, "gradient", variant, chip)
