# SPDX-License-Identifier: Apache-2.0
"""Public models by name: the geometry of their published configs, with sources.

One file per model: `config` holds a Hugging Face config cut down to what decides cache and size,
`source` where it comes from, and `published_parameters` a figure to check the count against.
"""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv.models.configs import read_config
from jaxkv.models.geometry import ModelGeometry


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Lists the models that are known by name."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def preset(name: str) -> dict[str, Any]:
    """Returns a preset's file: `source`, `published_parameters`, `published_source`, `config`.

    Raises:
      ValueError: If there is no preset of that name.
    """
    if name not in preset_names():
        raise ValueError(f"unknown model {name!r}: {_suggestion(name)}.")
    return json.loads((resources.files(__name__) / f"{name}.json").read_text("utf-8"))


def load_geometry(source: str | Path) -> ModelGeometry:
    """Finds a model: a preset's name, a `config.json`, or a folder that holds one.

    Raises:
      ValueError: If it is none of these, or its config cannot be read.

    >>> load_geometry("deepseek-v3").layers[0].spec.elements_per_token
    576
    """
    name = str(source).lower()
    if name in preset_names():
        return read_config(preset(name)["config"], name=name)
    if Path(source).exists():
        return read_config(source)
    raise ValueError(
        f"unknown model {str(source)!r}: no file or folder of that name, and {_suggestion(name)}."
    )


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), preset_names(), n=4, cutoff=0.5)
    if close:
        return "close presets are " + ", ".join(close)
    return "presets are " + ", ".join(preset_names())
