# SPDX-License-Identifier: Apache-2.0
"""What a pool of memory holds while requests come and go.

    scripts/run python scripts/simulate_allocation.py --output FOLDER

The library's own layouts are driven step by step, on records of two numbers, since only the
allocator matters. All requests wait at the start and begin, in their order, as soon as there are a
row and room; a prompt is appended in chunks, then a token at each step; a request that is done
frees its slots in that step. The queue is looked at every few steps. Where pages run out, tokens
are dropped and their rows flagged, never overwritten: they try again, and the youngest requests go
back to the queue, to be appended again. While it runs, pages held and free must add up to the pool,
rows must have grown by what they were given, no row may have more than one partial page, and every
32 calls all stored tokens are read back.

Waste is the share of the slots given out that hold no token, averaged over steps at which requests
were waiting (Kwon et al. 2023, arXiv:2309.06180, figure 2).
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import jax
import typer
from allocation.lengths import MIXES
from allocation.policies import policies
from allocation.report import Run, as_json, draw, table
from allocation.serving import Server
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NAMES = [mix.name for mix in MIXES]


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests of each mix.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths.")] = 0,
    mix: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; all.")] = None,
    page: Annotated[list[int] | None, typer.Option(help="Sizes of pages; 16, 64, 256.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt in one step.")] = 256,
    every: Annotated[int, typer.Option(min=1, help="Steps between looks at the queue.")] = 8,
    output: Annotated[Path | None, typer.Option(help="A folder for JSON and a picture.")] = None,
) -> None:
    """Serves the same requests from the same memory under each policy, and shows what it held."""
    chosen, pages = mix or NAMES, tuple(page or (16, 64, 256))
    if unknown := sorted(set(chosen) - set(NAMES)):
        raise typer.BadParameter(f"{unknown}: want some of {NAMES}.")
    console = Console()
    console.width = max(console.width, 124)  # a table that wraps cannot be read
    groups: list[list[Run]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for one in (m for m in MIXES if m.name in chosen):
            if wrong := [size for size in pages if size < 1 or one.pool % size]:
                raise typer.BadParameter(f"pages of {wrong} do not fill {one.pool} slots.")
            drawn, runs = one.draw(requests, seed), []
            for policy in policies(one, pages):
                task = progress.add_task(f"{one.name}: {policy.name}", total=requests)
                server = Server(one, policy, drawn, chunk=chunk, every=every)
                served = server.run(lambda n, task=task: progress.update(task, completed=n))
                runs.append(Run(one, policy.name, served))
            groups.append(runs)
    for runs in groups:
        console.print(table(runs))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        facts = {
            "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
            "jax": jax.__version__,
            "requests": requests,
            "seed": seed,
            "chunk": chunk,
            "every": every,
        }
        every_run = [run for runs in groups for run in runs]
        (output / "allocation.json").write_text(as_json(every_run, facts))
        draw(groups, output / "allocation.png")
        console.print(f"Wrote {output / 'allocation.json'} and {output / 'allocation.png'}.")


if __name__ == "__main__":
    typer.run(main)
