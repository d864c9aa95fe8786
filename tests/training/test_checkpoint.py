# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: which ones are kept, what survives a kill, and what is refused."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxkv.training import Checkpoints, Program, TrainConfig, parameters, restore_model
from jaxkv.training.placement import place_state
from jaxkv.training.state import TrainState
from tests.training.tiny import Bigram, decoder

CONFIG = TrainConfig(steps=100)


def state_at(step: int, model: nnx.Module | None = None) -> TrainState:
    """Makes a state whose arrays all tell the step."""
    model = model if model is not None else Bigram(rngs=nnx.Rngs(step))
    start = Program.of(model, CONFIG).init(parameters(model))
    state = jax.tree.map(lambda x: x + step if jnp.issubdtype(x.dtype, jnp.number) else x, start)
    return TrainState(state.params, state.opt_state, state.step, state.cursor, jax.random.key(step))


def assert_same(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "checkpoints"))


def test_last_and_best_are_kept_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    kept = []
    for step, loss in ((1, 3.0), (2, None), (3, 2.0), (4, 2.5), (5, None), (6, 2.0)):
        checkpoints.save(state_at(step), loss)
        kept.append(names(tmp_path))
    assert kept == [["1"], ["1", "2"], ["3"], ["3", "4"], ["3", "5"], ["3", "6"]]
    opened = Checkpoints(tmp_path)
    assert (opened.last, opened.best, opened.best_loss) == (6, 3, 2.0)
    assert_same(opened.restore(state_at(0)), state_at(6))
    assert_same(opened.restore(state_at(0), "best"), state_at(3))


def test_left_overs_of_a_kill_are_passed_over_and_removed(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(state_at(4), 1.0)
    for name in ("8.orbax-checkpoint-tmp-1", "2.removed"):
        (tmp_path / "checkpoints" / name / "params").mkdir(parents=True)
    opened = Checkpoints(tmp_path)
    assert_same(opened.restore(state_at(0)), state_at(4))
    opened.save(state_at(9), 0.5)
    assert names(tmp_path) == ["9"]


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(state_at(1), 1.0)
    opened = Checkpoints(tmp_path)
    wide = state_at(0, Bigram(5, rngs=nnx.Rngs(0)))
    words = r"1 is a checkpoint of another model: embedding is \(256, 4\) there and \(256, 5\) here"
    with pytest.raises(ValueError, match=words):
        opened.restore(wide)
    words = r"blocks\.0\.attention\.key\.kernel is missing there and \(16, 2, 8\) here"
    with pytest.raises(ValueError, match=words):
        restore_model(tmp_path, decoder())
    with pytest.raises(ValueError, match="there is no best checkpoint in"):
        restore_model(tmp_path / "elsewhere", decoder())
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ValueError, match="which='first': want 'last' or 'best'"):
        restore_model(tmp_path, decoder(), which="first")  # type: ignore[arg-type]


def test_a_model_is_read_without_its_optimiser(tmp_path: Path) -> None:
    model = decoder(seed=1)
    program = Program.of(model, CONFIG)
    Checkpoints(tmp_path).save(program.init(parameters(model)), 1.0)
    other = decoder(seed=2)
    before = parameters(other)
    read = restore_model(tmp_path, other)
    jax.tree.map(np.testing.assert_array_equal, parameters(read), parameters(model))
    jax.tree.map(np.testing.assert_array_equal, parameters(other), before)
    assert read.blocks[0].attention.query.kernel.get_metadata("axes")


def test_missing_orbax_gives_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkv\[train\]"'):
        Checkpoints(tmp_path)


@pytest.mark.parametrize("devices", [1, 2])
def test_jax_19_a_run_goes_on_with_other_devices(tmp_path: Path, devices: int) -> None:
    model = decoder()
    program = Program.of(model, CONFIG)
    state = program.init(parameters(model))

    def on(count: int) -> TrainState:
        mesh = jax.make_mesh(
            (1, count),
            ("data", "tensor"),
            devices=jax.devices()[:count],
            axis_types=(AxisType.Auto,) * 2,
        )
        return place_state(program, state, mesh)

    Checkpoints(tmp_path).save(on(4), 1.0)
    like = on(devices)
    read = Checkpoints(tmp_path).restore(like)
    assert_same(read, state)
    places = [x.sharding for x in jax.tree.leaves(read)]
    assert places == [x.sharding for x in jax.tree.leaves(like)]
    assert len(read.params["embedding"].sharding.device_set) == devices
