# SPDX-License-Identifier: Apache-2.0
"""What `jaxkv train` notes beside its checkpoints, so that the model can be built again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jaxkv.cli.variants import VARIANTS, Size, make_decoder, pick
from jaxkv.core.numerics import Numerics
from jaxkv.models.decoder import Decoder

NOTE = "model.json"


@dataclasses.dataclass(frozen=True)
class ModelNote:
    """States a trained model's architecture, and which text it learns from."""

    variant: str
    layers: int
    features: int
    heads: int
    mlp_features: int
    text_sha256: str = ""

    def make(self, numerics: Numerics, **options: object) -> Decoder:
        """Builds the model with new parameters."""
        size = Size(self.layers, self.features, self.heads, length=1, batch=1, steps=1)
        return make_decoder(
            pick(self.variant, VARIANTS, "variant"),
            size,
            mlp_features=self.mlp_features,
            numerics=numerics,
            **options,  # type: ignore[arg-type]
        )

    def write(self, directory: Path) -> None:
        """Notes the model in a run's directory.

        Raises:
          ValueError: If the directory holds a run of another model.
        """
        make_folder(directory)
        if (directory / NOTE).exists() and (there := read_note(directory)) != self:
            same = dataclasses.replace(there, text_sha256=self.text_sha256) == self
            what = "text" if same else "model"
            raise ValueError(f"{directory} holds a run of another {what}: {there}, not {self}.")
        (directory / NOTE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def make_folder(directory: Path) -> None:
    """Makes the folder of a command's results, if it is not there.

    Raises:
      ValueError: If it is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: --output wants a folder.")
    directory.mkdir(parents=True, exist_ok=True)


def read_note(directory: Path) -> ModelNote:
    """Reads what a run's directory says of its model.

    Raises:
      ValueError: If the directory is none of `jaxkv train`.
    """
    path = directory / NOTE
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no {NOTE}: want a folder made by jaxkv train --output."
        )
    try:
        return ModelNote(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a note of jaxkv train: {error}.") from error
