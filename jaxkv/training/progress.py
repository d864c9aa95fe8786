# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from jaxkv.core.extras import require


class Lines:
    """Prints plain lines on stderr where no bar can move (a log file, a pipe).

    Args:
      pause: Seconds between two lines.
    """

    def __init__(self, pause: float = 5.0) -> None:
        self._pause, self._next = pause, 0.0

    def say(self, text: str) -> None:
        """Prints a line, unless one was printed just before."""
        if time.monotonic() >= self._next:
            print(text, file=sys.stderr, flush=True)
            self._next = time.monotonic() + self._pause


class Progress:
    """Shows steps, losses and speed on stderr, as a context manager: a bar, or lines in a log.

    Args:
      steps: Of the whole run.
      done: Steps that are done already.
      shown: True shows it, False does not, and `None` shows it on a terminal.

    Raises:
      ImportError: With the line that installs it, if `shown` is True and Rich is missing.
    """

    def __init__(self, steps: int, done: int, shown: bool | None) -> None:
        self._bar: Any = None
        self._lines: Lines | None = None
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
        if not console.is_terminal:
            self._lines = Lines()

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
        if self._lines is not None:
            self._lines.say(f"step {line['step']:,}/{self._bar.tasks[0].total:,.0f} {text}")
        self._bar.update(self._task, completed=line["step"], description=text)
