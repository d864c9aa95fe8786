# SPDX-License-Identifier: Apache-2.0
"""Everything that training changes, as one pytree, and what stays the same beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxkv.training.config import TrainConfig
from jaxkv.training.optimiser import optimiser


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Holds all that a run needs to go on as if it had never stopped.

    Attributes:
      params: float32 master weights, nested dicts by name.
      opt_state: Of the optimiser.
      step: int32, steps done.
      cursor: int32, training rows drawn.
      key: Random key of the run; step n uses `fold_in(key, n)`.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    cursor: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """Holds what no step changes.

    Attributes:
      graphdef: The model without its parameters.
      axes: Logical axis names of each parameter, as a tree like `params`; `None`: none given.
      optimiser: Updates the parameters.
      config: Of the run.
    """

    graphdef: Any
    axes: Any
    optimiser: optax.GradientTransformation
    config: TrainConfig

    @classmethod
    def of(cls, model: nnx.Module, config: TrainConfig) -> Program:
        """Takes a model apart; it may be an abstract one, of `nnx.eval_shape`.

        Raises:
          ValueError: If the model holds arrays that are no parameters.
        """
        graphdef, variables, rest = nnx.split(model, nnx.Param, ...)
        if jax.tree.leaves(rest):
            paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
            raise ValueError(f"the model holds {paths[0]}, which is no nnx.Param: cannot train it.")
        axes = {path: v.get_metadata().get("axes") for path, v in nnx.to_flat_state(variables)}
        nested = nnx.traversals.unflatten_mapping(axes)
        return cls(graphdef, nested, optimiser(config), config)

    def model(self, params: Any) -> Any:
        """Puts a model together from its parameters."""
        return nnx.merge(self.graphdef, params)

    def init(self, params: Any) -> TrainState:
        """Makes the state before the first step; it owns its arrays, so it can be donated.

        Args:
          params: As `parameters` gives them, on whatever devices.
        """
        masters = jax.tree.map(_master, params)
        return TrainState(
            params=masters,
            opt_state=self.optimiser.init(masters),
            step=jnp.zeros((), jnp.int32),
            cursor=jnp.zeros((), jnp.int32),
            key=jax.random.key(self.config.seed),
        )


def parameters(model: nnx.Module) -> Any:
    """Takes the parameters out of a model, as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _master(x: jax.Array) -> jax.Array:
    return jnp.array(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
