# SPDX-License-Identifier: Apache-2.0
"""Speed beside named rivals, as ratios within one run: scripts/run python scripts/bench.py decode

Every case runs ours and its rival in turn, in one process, on the same live tokens. The figure is
the median of the runs' CPU time over all threads (wall time on an accelerator), and the ratio is
ours / rival: below 1 is faster. Only ratios of one run mean anything on a shared machine.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import flax
import jax
import numpy as np
import typer
from families.attention import attention_cases
from families.decode import decode_cases
from families.latent import latent_cases
from families.live import live_cases
from families.measuring import QUICK, Case, Counted, Sizes, measure
from families.model import model_cases
from families.picture import draw
from families.quantised import quantised_cases
from families.ragged import ragged_cases
from rich.console import Console
from rich.progress import track
from rich.table import Table

FAMILIES: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "decode": decode_cases,
    "live": live_cases,
    "ragged": ragged_cases,
    "latent": latent_cases,
    "quantised": quantised_cases,
    "model": model_cases,
    "attention": attention_cases,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One case with its two figures."""

    case: Case
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours / rival's."""
        return self.ours / self.theirs

    def verdict(self) -> tuple[str, str]:
        """Tells the goal, and whether it is met."""
        goal = self.case.goal
        if goal is None:
            return "", ""
        return f"<= {goal:.3g}", "met" if self.ratio <= goal else "missed"

    def figures(self) -> tuple[str, str]:
        """Writes the two figures with their unit."""
        digits = 0 if isinstance(self.case, Counted) else 2
        ours, theirs = (f"{x:,.{digits}f} {self.case.unit}" for x in (self.ours, self.theirs))
        return ours, theirs


def table(title: str, rows: list[Row]) -> Table:
    """Lists the cases."""
    out = Table(title=title)
    for column in ("case", "rival", "ours", "rival's", "ours / rival", "goal", ""):
        out.add_column(column, justify="left" if column in ("case", "rival", "") else "right")
    for row in rows:
        case = row.case
        out.add_row(case.name, case.rival, *row.figures(), f"{row.ratio:.3f}", *row.verdict())
    return out


def as_json(rows: list[Row], facts: dict[str, Any]) -> str:
    """Writes the cases."""

    def one(row: Row) -> dict[str, Any]:
        unit, case = row.case.unit, row.case
        figures = {f"ours_{unit}": row.ours, f"rival_{unit}": row.theirs, "ratio": row.ratio}
        return {"case": case.name, "rival": case.rival, **figures, "goal": case.goal}

    return json.dumps({**facts, "rows": [one(row) for row in rows]}, indent=2) + "\n"


def main(
    family: Annotated[str, typer.Argument(help=f"One of: {', '.join(FAMILIES)}.")] = "decode",
    quick: Annotated[bool, typer.Option(help="Tiny sizes, to see that it runs.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them against the length here.")] = None,
) -> None:
    """Runs one family of comparisons and prints the ratios."""
    if family not in FAMILIES:
        raise typer.BadParameter(f"{family}: want one of {sorted(FAMILIES)}.")
    console = Console()
    console.width = max(console.width, 120)  # a table that wraps cannot be read
    device = jax.devices()[0]
    versions = f"jax {jax.__version__}, flax {flax.__version__}, numpy {np.__version__}"
    console.print(f"{device.device_kind} ({platform.machine()}), {versions}")
    kind = "CPU ms over all threads" if device.platform == "cpu" else "wall ms"
    cases = list(FAMILIES[family](QUICK if quick else Sizes()))
    if plot is not None and all(case.series is None for case in cases):
        raise typer.BadParameter(f"{family} has no case that depends on a length to plot.")
    rows = [
        Row(case, *measure(case, repeats))
        for case in track(cases, description=family, console=console)
    ]
    console.print(table(f"{family}: median of {repeats} runs, {kind}", rows))
    if output is not None:
        facts = {"device": device.device_kind, "versions": versions, "clock": kind}
        output.write_text(as_json(rows, facts))
    if plot is not None:
        draw(
            [
                (*row.case.series, row.case.unit, row.case.rival, row.ours, row.theirs)
                for row in rows
                if row.case.series is not None
            ],
            plot,
        )


if __name__ == "__main__":
    typer.run(main)
