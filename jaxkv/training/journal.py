# SPDX-License-Identifier: Apache-2.0
"""What a run writes down: its config, and its metrics as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

from jaxkv.training.config import TrainConfig

Line = dict[str, Any]


class Journal:
    """Keeps the metrics of every step, in memory and in `directory/metrics.jsonl`.

    Args:
      directory: Of the run; `None` keeps them in memory only.
      config: Of the run, written to `directory/config.json`.
      step: Steps that are done. Later lines, which a killed run left behind, are dropped, so that
        a resumed run writes what an unbroken one would.

    Raises:
      ValueError: If the run began with another seed or length: its cursor would count other rows.
    """

    def __init__(
        self, directory: str | PathLike[str] | None, config: TrainConfig, step: int
    ) -> None:
        self.history: list[Line] = []
        self._path: Path | None = None
        if directory is None:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        if step:
            _check_config(folder / "config.json", config)
            self.history = [line for line in _lines(self._path) if line["step"] <= step]
        _write(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        _write(self._path, "".join(map(_text, self.history)))

    def add(self, line: Line) -> None:
        """Adds the metrics of one step; they are in the file when this returns."""
        self.history.append(line)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_text(line))


def _check_config(path: Path, config: TrainConfig) -> None:
    if not path.exists():
        return
    before = json.loads(path.read_text("utf-8"))
    for name in ("seed", "length"):
        if before[name] != getattr(config, name):
            raise ValueError(
                f"this run began with {name}={before[name]}: it cannot go on with "
                f"{name}={getattr(config, name)}."
            )


def _lines(path: Path) -> list[Line]:
    """Reads the whole lines of a file; a killed run may have left half a line at its end."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"


def _write(path: Path, text: str) -> None:
    """Writes a file so that it is there as before or complete."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
