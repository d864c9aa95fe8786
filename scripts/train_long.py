# SPDX-License-Identifier: Apache-2.0
"""Trains on long rows with attention in tiles and with all scores at once, and compares the two.

    scripts/run python scripts/train_long.py --length 2048 --output FOLDER

Each run is `jaxkv train` in a process of its own, whose peak memory is taken. The two dense forms
(`einsum` and `reference`) are the same function, so what their curves differ by is how far rounding
alone moves a run of this model, text and seed. `blockwise` is a third way to round: its curve may
differ from `einsum`'s by FACTOR times the largest difference of theirs so far, since two more draws
of one noise differ by more than that in few of 1,000 runs if they are normal; and at the first step
by rounding of the loss itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

DENSE = ("einsum", "reference")
FACTOR = 4.0
# The loss is a mean of float32 terms: 8 roundings of it, and its size is log 256.
FLOOR = 8 * 2.0**-24 * 5.6


class Run(NamedTuple):
    """One training run: its losses by step, peak memory in MiB, and tokens per second."""

    name: str
    losses: list[float]
    peak: float
    speed: float


def trained(name: str, length: int, rows: int, steps: int, folder: Path, options: list[str]) -> Run:
    """Trains in a process of its own."""
    output = folder / f"{name}-{length}"
    command = [sys.executable, "-m", "jaxkv", "train", "--output", str(output)]
    command += ["--implementation", name, "--length", str(length), "--batch", str(rows)]
    command += ["--steps", str(steps), "--eval-every", str(steps), "--save-every", str(steps)]
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"{name}-{length}.log"
    with said.open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} at {length} tokens failed:\n{said.read_text()[-2000:]}")
    lines = (output / "metrics.jsonl").read_text().splitlines()
    found = [one for one in map(json.loads, lines) if "loss" in one]
    speeds = [one["tokens_per_second"] for one in found]
    # Kilobytes on Linux, bytes on macOS.
    peak = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    losses = [one["loss"] for one in found]
    return Run(name, losses, peak, statistics.median(speeds[len(speeds) // 2 :]))


def gaps(one: Run, other: Run) -> list[float]:
    """Compares two curves step by step."""
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


def main(
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 20,
    alone: Annotated[bool, typer.Option(help="Only attention in tiles, no comparison.")] = False,
    size: Annotated[str, typer.Option(help="As in jaxkv train.")] = "small",
    output: Annotated[Path, typer.Option(help="Folder for the runs and the figures.")] = Path(
        "jaxkv-long"
    ),
) -> None:
    """Trains the same model in each way and compares losses, memory and time."""
    console = Console()
    names = ("blockwise",) if alone else ("blockwise", *DENSE)
    runs = []
    for name in names:
        console.print(f"{name}: {steps} steps of {rows} x {length}")
        runs.append(trained(name, length, rows, steps, output, ["--size", size]))
    table = Table(title=f"{size}, {steps} steps of {rows} x {length} tokens")
    for column in ("attention", "first loss", "last loss", "peak memory, MiB", "tokens/s"):
        table.add_column(column, justify="right" if column != "attention" else "left")
    for run in runs:
        first, last = f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}"
        table.add_row(run.name, first, last, f"{run.peak:,.0f}", f"{run.speed:,.0f}")
    console.print(table)
    facts = {"length": length, "rows": rows, "runs": [run._asdict() for run in runs]}
    (output / f"long-{length}.json").write_text(json.dumps(facts, indent=2) + "\n")
    if alone:
        return
    tiles, einsum, reference = runs
    noise, gap, top = gaps(einsum, reference), gaps(tiles, einsum), 0.0
    bounds = [FACTOR * (top := max(top, n)) + FLOOR for n in noise]
    inside = all(g <= b for g, b in zip(gap, bounds, strict=True))
    console.print(
        f"largest gap to einsum {max(gap):.2e}, between the dense forms {max(noise):.2e}: "
        f"{'within' if inside else 'NOT within'} the bound at every step"
    )
    if not inside:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
