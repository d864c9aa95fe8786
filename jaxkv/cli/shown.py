# SPDX-License-Identifier: Apache-2.0
"""The progress of a command with several parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxkv.training.progress import Lines


class Shown:
    """Shows a bar for each part on stderr, or lines where it is no terminal; a context manager.

    Args:
      parts: Their names, in order.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console)
        self._tasks = {p: self._bars.add_task(p, total=1.0, what="waiting") for p in parts}
        self._lines = None if console.is_terminal else Lines()

    def __enter__(self) -> Self:
        if self._lines is None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._lines is None:
            self._bars.stop()

    def show(self, part: str, what: str, share: float) -> None:
        """Shows what is being done of a part, and the share of it that is done."""
        self._bars.update(self._tasks[part], completed=share, what=what)
        if self._lines is not None:
            self._lines.say(f"{part} {share:4.0%} {what}")
