# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the last one, and the one with the best validation loss."""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from jaxkv.core.extras import require
from jaxkv.training.state import TrainState, parameters

Which = Literal["last", "best"]


class Checkpoints:
    """Stores whole training states in `directory/checkpoints/STEP`.

    A checkpoint appears under its number by one rename when it is complete, and older ones are
    removed after that, so there is a usable one at every moment once there has been one.

    Args:
      directory: Of the run.

    Raises:
      ImportError: With the line that installs it, if Orbax is missing.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._orbax = require("orbax.checkpoint", extra="train")
        tree = self._orbax.StandardCheckpointHandler
        self._checkpointer = self._orbax.Checkpointer(
            self._orbax.CompositeCheckpointHandler(
                params=tree(), training=tree(), score=self._orbax.JsonCheckpointHandler()
            )
        )
        self.directory = Path(directory).absolute() / "checkpoints"
        self._losses = {step: self._read_loss(step) for step in self._on_disk()}

    @property
    def last(self) -> int | None:
        """Finds the step of the last checkpoint."""
        return max(self._losses, default=None)

    @property
    def best(self) -> int | None:
        """Finds the step of the checkpoint with the smallest validation loss."""
        known = {step: loss for step, loss in self._losses.items() if loss is not None}
        return min(known, key=lambda step: (known[step], step), default=None)

    @property
    def best_loss(self) -> float:
        """Looks up the smallest validation loss, infinity if there is none."""
        loss = None if self.best is None else self._losses[self.best]
        return float("inf") if loss is None else loss

    def save(self, state: TrainState, validation_loss: float | None) -> None:
        """Stores a state, and then removes all but the last and the best one."""
        step, args = int(state.step), self._orbax.args
        self._clean()
        self._checkpointer.save(
            self.directory / str(step),
            args=args.Composite(
                params=args.StandardSave(state.params),
                training=args.StandardSave(_beside_params(state)),
                score=args.JsonSave({"validation_loss": validation_loss}),
            ),
        )
        self._losses[step] = validation_loss
        for old in set(self._losses) - {self.last, self.best}:
            del self._losses[old]
            self._remove(self.directory / str(old))

    def restore(self, like: TrainState, which: Which = "last") -> TrainState:
        """Reads a state.

        Args:
          like: A state of the same model, whose placement the arrays get.
          which: "last" or "best".

        Returns:
          The state.

        Raises:
          ValueError: If there is no checkpoint, or it is of another model.
        """
        path, args = self._path(which), self._orbax.args
        params, training = _abstract(like.params), _abstract(_beside_params(like))
        self._check(path, params)
        read = self._checkpointer.restore(
            path,
            args=args.Composite(
                params=args.StandardRestore(params), training=args.StandardRestore(training)
            ),
        )
        return TrainState(params=read.params, **read.training)

    def restore_params(self, like: Any, which: Which = "best") -> Any:
        """Reads parameters alone; arguments and errors as in `restore`."""
        path, args = self._path(which), self._orbax.args
        params = _abstract(like)
        self._check(path, params)
        composite = args.Composite(params=args.StandardRestore(params))
        return self._checkpointer.restore(path, args=composite).params

    def _path(self, which: Which) -> Path:
        if which not in ("last", "best"):
            raise ValueError(f"which={which!r}: want 'last' or 'best'.")
        step = self.last if which == "last" else self.best
        if step is None:
            raise ValueError(f"there is no {which} checkpoint in {self.directory}.")
        return self.directory / str(step)

    def _check(self, path: Path, params: Any) -> None:
        stored = self._checkpointer.metadata(path).item_metadata["params"].tree
        there, here = _shapes(stored), _shapes(params)
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"{path} is a checkpoint of another model: {name} is "
                    f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here."
                )

    def _read_loss(self, step: int) -> float | None:
        args = self._orbax.args
        composite = args.Composite(score=args.JsonRestore())
        path = self.directory / str(step)
        return self._checkpointer.restore(path, args=composite).score["validation_loss"]

    def _on_disk(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return [int(path.name) for path in self.directory.iterdir() if path.name.isdecimal()]

    def _clean(self) -> None:
        """Removes what a killed run left half written or half removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if not path.name.isdecimal():
                shutil.rmtree(path)

    @staticmethod
    def _remove(path: Path) -> None:
        # Renamed first: a checkpoint must not be found with half of its files.
        gone = path.rename(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(gone)


def restore_model[Model: nnx.Module](
    directory: str | PathLike[str], model: Model, which: Which = "best"
) -> Model:
    """Reads a trained model.

    Args:
      directory: Of the run, as given to `train`.
      model: One of the same shape; it is left as it is.
      which: "best" by validation loss, or "last".

    Returns:
      The model with float32 parameters, placed like those of `model`.

    Raises:
      ValueError: If there is no checkpoint, or it is of another model.
      ImportError: If Orbax is missing.
    """
    params = Checkpoints(directory).restore_params(parameters(model), which)
    return nnx.merge(nnx.graphdef(model), params)


def _beside_params(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("opt_state", "step", "cursor", "key")}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Lists shapes by dotted name; Orbax writes all keys as strings."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}
