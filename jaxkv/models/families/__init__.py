# SPDX-License-Identifier: Apache-2.0
"""Decoders from Hugging Face checkpoints. A new family is one file here and one line below."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.core.numerics import Numerics
from jaxkv.models.configs import read_config
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import deepseek, llama
from jaxkv.models.families.loading import Recipe, fill, open_tensors
from jaxkv.models.geometry import ModelGeometry

FAMILIES: dict[str, Callable[[Mapping[str, Any], ModelGeometry], Recipe]] = {
    "deepseek_v3": deepseek.recipe,
    "llama": llama.recipe,
}


def from_hf(
    config: Mapping[str, Any] | str | Path,
    tensors: Mapping[str, np.ndarray] | str | Path,
    *,
    numerics: Numerics | None = None,
) -> Decoder:
    """Builds a decoder with the weights of a Hugging Face checkpoint.

    Args:
      config: Contents of a `config.json`, its path, or the folder that holds it.
      tensors: The checkpoint's tensors by name, a safetensors file, or a folder of such files.
      numerics: Formats of the decoder; parameters are cast to `param_dtype`. Default `Numerics()`.

    Returns:
      The decoder. On a mesh, its parameters are placed by their logical axes.

    Raises:
      ValueError: If the config says something that is not known or not supported, or if a tensor
        is missing, left over or of another shape; the message names it.
      ImportError: With the install line, if files are given and safetensors is not installed.
    """
    geometry = read_config(config)
    raw = config if isinstance(config, Mapping) else _json(Path(config))
    model_type = raw["model_type"]
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r}: its weights cannot be loaded, only those of "
            f"{', '.join(sorted(FAMILIES))}."
        )
    made = FAMILIES[model_type](raw, geometry)
    if not isinstance(tensors, Mapping):
        tensors = open_tensors(tensors)
    return fill(made, tensors, numerics if numerics is not None else Numerics())


def _json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    return json.loads(file.read_text("utf-8"))
