# SPDX-License-Identifier: Apache-2.0
"""Fills a decoder with the tensors of a checkpoint, and accounts for every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.core.extras import require
from jaxkv.core.numerics import Numerics
from jaxkv.core.sharding import current_mesh, spec_for
from jaxkv.models.decoder import Decoder

# Old checkpoints hold these tables; they follow from the config.
DERIVED = ("rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Weight:
    """States where one parameter comes from.

    Args:
      target: Path of the parameter in the decoder, joined by dots.
      source: Name of the tensor in the checkpoint. Several parameters may share one.
      shape: Shape that the tensor must have.
      convert: Turns it into the parameter.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor


@dataclasses.dataclass(frozen=True)
class Recipe:
    """States how one checkpoint becomes a decoder.

    Args:
      decoder: Called as `decoder(numerics=, rngs=)`; builds the model.
      weights: One for each of its parameters.
      copies: Tensor -> the tensor that it may repeat (a tied head that was saved all the same).
    """

    decoder: Callable[..., Decoder]
    weights: Sequence[Weight]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)


def fill(recipe: Recipe, tensors: Mapping[str, np.ndarray], numerics: Numerics) -> Decoder:
    """Builds the decoder and gives every parameter its tensor.

    On a mesh, parameters are placed by their logical axes.

    Args:
      recipe: What goes where.
      tensors: The checkpoint's tensors by name, any float dtype; read one at a time.
      numerics: Parameters are cast to `param_dtype`.

    Raises:
      ValueError: Naming the tensors that are missing, left over or of another shape, or the
        parameters that the recipe forgets.
    """
    _check_names(recipe, tensors)
    # No parameter is drawn: the model is only its shapes until the tensors are in.
    shapes = nnx.eval_shape(lambda: recipe.decoder(numerics=numerics, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shapes)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    targets = [weight.target for weight in recipe.weights]
    _complain(set(parameters) - set(targets), "no tensor sets the parameters")
    _complain(set(targets) - set(parameters), "the model has no parameters")
    values = {
        weight.target: _converted(weight, tensors[weight.source], parameters[weight.target])
        for weight in recipe.weights
    }
    filled = [
        (path, leaf.replace(values[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def open_tensors(path: str | Path) -> Mapping[str, np.ndarray]:
    """Opens a safetensors file, or a folder's `model*.safetensors`, without reading the tensors.

    Raises:
      ValueError: If there is no such file, it is no safetensors file, or two files of a folder
        have a tensor of the same name.
      ImportError: With the install line, if safetensors is not installed.
    """
    path = Path(path)
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"no weights at {str(path)!r}: want a safetensors file, or a folder with "
            "model.safetensors or its parts."
        )
    library = require("safetensors", extra="hf")
    return _Files(library, files)


class _Files(Mapping[str, np.ndarray]):
    """Reads tensors of several files by name."""

    def __init__(self, library: Any, files: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                opened = library.safe_open(file, framework="numpy")
            except library.SafetensorError as error:
                raise ValueError(f"{str(file)!r} is no safetensors file: {error}.") from error
            names = set(opened.keys())
            _complain(names & set(self._files), f"{str(file)!r} repeats the tensors")
            self._files |= dict.fromkeys(names, opened)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _check_names(recipe: Recipe, tensors: Mapping[str, np.ndarray]) -> None:
    wanted = {weight.source for weight in recipe.weights}
    given = {name for name in tensors if not name.endswith(DERIVED)}
    _complain(wanted - given, "the checkpoint lacks the tensors")
    copies = {name for name in recipe.copies if name in given}
    _complain(given - wanted - copies, "the model has no place for the tensors")
    for name in sorted(copies):
        if not np.array_equal(tensors[name], tensors[recipe.copies[name]]):
            raise ValueError(f"{name} differs from {recipe.copies[name]}, which the config ties.")


def _complain(names: Iterable[str], what: str) -> None:
    found = sorted(names)
    if found:
        raise ValueError(f"{what} {', '.join(found)}.")


def _converted(weight: Weight, tensor: np.ndarray, parameter: nnx.Variable) -> jax.Array:
    if tensor.shape != weight.shape:
        raise ValueError(f"{weight.source} {tensor.shape}: the config wants {weight.shape}.")
    wanted = parameter.get_value()
    value = jnp.asarray(weight.convert(tensor), wanted.dtype)
    if value.shape != wanted.shape:
        raise ValueError(f"{weight.source} gives {weight.target} {value.shape}: {wanted.shape}.")
    if current_mesh() is None:
        return value
    axes = parameter.get_metadata().get("axes") or (None,) * value.ndim
    return jax.device_put(value, spec_for(axes, value.shape))
