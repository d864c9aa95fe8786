# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run."""

from __future__ import annotations

import sys
from typing import Any, Self

from jaxkv.core.extras import require


class Progress:
    """Shows steps, losses and speed on stderr, as a context manager.

    Args:
      steps: Of the whole run.
      done: Steps that are done already.
      shown: True shows it, False does not, and `None` shows it on a terminal.

    Raises:
      ImportError: With the line that installs it, if `shown` is True and Rich is missing.
    """

    def __init__(self, steps: int, done: int, shown: bool | None) -> None:
        self._bar: Any = None
        if shown is None:
            try:
                shown = sys.stderr.isatty() and bool(require("rich.progress", extra="train"))
            except ImportError:
                shown = False
        if not shown:
            return
        rich = require("rich.progress", extra="train")
        console = require("rich.console", extra="train").Console(stderr=True)
        self._bar = rich.Progress(
            rich.TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            rich.BarColumn(),
            rich.TextColumn("{task.description}"),
            rich.TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._validation = ""

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Shows the metrics of one step."""
        if self._bar is None:
            return
        if "validation_loss" in line:
            self._validation = f" · validation {line['validation_loss']:.4f}"
        text = (
            f"loss {line['loss']:.4f}{self._validation} · {line['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=line["step"], description=text)
