# SPDX-License-Identifier: Apache-2.0
"""Where parameters, optimiser state and batches lie on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv.core.sharding import Rules, current_mesh, named
from jaxkv.training.batch import Batch
from jaxkv.training.state import Program, TrainState


def parameter_shardings(axes: Any, params: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Places each parameter by its logical axes; one without axes lies whole on every device.

    Args:
      axes: Tree like `params` with a tuple of names (or `None`) for each, as in `Program`.
      params: Arrays, or their shapes.
      mesh: Of any axis types.
      rules: Logical to mesh axes; default those of `use_rules`.

    Returns:
      A tree of `NamedSharding` like `params`.
    """

    def one(x: Any, names: tuple[str | None, ...] | None) -> NamedSharding:
        return named(mesh, names or (None,) * x.ndim, x.shape, rules)

    return jax.tree.map(one, params, axes)


def shardings(
    program: Program, state: TrainState, mesh: Mesh, rules: Rules | None = None
) -> TrainState:
    """Places a whole state: what the optimiser keeps of a parameter lies where the parameter does.

    Args:
      program: Knows the logical axes.
      state: Arrays, or their shapes.
      mesh: Of any axis types.
      rules: Logical to mesh axes; default those of `use_rules`.

    Returns:
      A tree of `NamedSharding` like `state`.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(program.axes, state.params, mesh, rules)
    opt_state = optax.tree_map_params(
        program.optimiser,
        lambda _, place: place,
        state.opt_state,
        params,
        transform_non_params=lambda _: whole,
    )
    everywhere = jax.tree.map(lambda _: whole, state)
    return dataclasses.replace(everywhere, params=params, opt_state=opt_state)


def init_sharded(
    make_model: Callable[[], nnx.Module], mesh: Mesh, rules: Rules | None = None
) -> Any:
    """Draws a model's parameters where they belong: no device ever holds the whole.

    Args:
      make_model: Makes the model, with its own `nnx.Rngs`.
      mesh: Of any axis types.
      rules: Logical to mesh axes; default those of `use_rules`.

    Returns:
      The model; its parameters are those of `make_model()`, up to the last bit.
    """
    graphdef, variables = nnx.split(nnx.eval_shape(make_model))
    flat = nnx.to_flat_state(variables)
    places = {
        path: named(mesh, v.get_metadata().get("axes") or (None,) * v.ndim, v.shape, rules)
        for path, v in flat
    }
    # Initialisers say nothing of placement, which an Explicit mesh would take for "whole on every
    # device": so the compiler places them on an Auto mesh of the same devices.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    drawn_at = {path: NamedSharding(auto, place.spec) for path, place in places.items()}

    def draw() -> dict[Any, jax.Array]:
        made = nnx.state(make_model())
        return {path: v[...] for path, v in nnx.to_flat_state(made)}

    with jax.set_mesh(auto):
        drawn = jax.jit(draw, out_shardings=drawn_at)()
    placed = jax.device_put(drawn, places)
    return nnx.merge(graphdef, nnx.traversals.unflatten_mapping(placed))


def ambient_mesh() -> Mesh | None:
    """Finds the devices of the mesh set by `jax.set_mesh`, or `None` where there is none."""
    return jax.sharding.get_mesh() if current_mesh() is not None else None


def place_state(program: Program, state: TrainState, mesh: Mesh | None) -> TrainState:
    """Moves a state to where it belongs on a mesh."""
    return state if mesh is None else jax.device_put(state, shardings(program, state, mesh))


def place_batch(batch: Batch, mesh: Mesh | None) -> Batch:
    """Moves a batch `[..., B, T + 1]` to the devices, rows over the data axis."""

    def one(x: Any) -> jax.Array:
        if mesh is None:
            return jax.device_put(x)
        axes = (*(None,) * (x.ndim - 2), "batch", None)
        return jax.device_put(x, named(mesh, axes, x.shape))

    return jax.tree.map(one, batch)
