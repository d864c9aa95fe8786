# SPDX-License-Identifier: Apache-2.0
"""`jaxkv plan`: what a real model's cache costs, from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxkv.memory import planner
from jaxkv.memory.chips import CHIPS, find_chip
from jaxkv.memory.plot import draw
from jaxkv.memory.policy import PINNED
from jaxkv.memory.report import as_dict
from jaxkv.memory.table import tables
from jaxkv.memory.units import parse_bytes
from jaxkv.models.presets import load_geometry, preset_names


def plan(
    name: Annotated[
        str | None, typer.Argument(help="A preset, a config.json, or a folder that holds one.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of every sequence; the model's limit if not given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            help="Storage: bf16, fp16, fp32, fp8; with scales int8, int4, float8, or int4:32 for "
            "a scale per 32 channels; kivi, kivi2, kivi8, or kivi:32 for groups of 32 tokens."
        ),
    ] = "bfloat16",
    devices: Annotated[
        str, typer.Option(help="Mesh, such as tensor=8,data=2; one device if not given.")
    ] = "",
    chip: Annotated[
        str | None, typer.Option(help=f"Show what fits on a chip: {', '.join(CHIPS)}.")
    ] = None,
    windows: Annotated[
        str,
        typer.Option(
            help="What layers keep. window: window layers their window, in a ring, the others "
            "every token (window+S: S spare slots in a ring, for deeper rollbacks). full: every "
            "token. pages:Z: every token, on pages of Z (pages:ZxP: a pool of P pages for all "
            "rows). ring:W, sinks:W: at most the last W tokens, with sinks the first "
            f"{PINNED} too (ring:W+S as above). h2o:Z, tova:Z: Z chosen tokens in layers without "
            "a window; snapkv:Z+R: Z chosen ones of a prompt and R that follow it. "
            "h2o:Z/pyramid, and so on: Z on average, more in lower layers. Of budgets by head, "
            "give the largest."
        ),
    ] = "window",
    weights: Annotated[
        str | None,
        typer.Option(help="Size of all weights, such as 60.8GiB; bfloat16 if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory against length into this file (.png, .svg).")
    ] = None,
) -> None:
    """Show what a model's KV cache costs: per token, per sequence, per device, and what fits."""
    if name is None:
        raise ValueError(f"name a model, a config.json or a folder; {', '.join(preset_names())}.")
    found = planner.plan(
        load_geometry(name),
        context=context,
        batch=batch,
        dtype=dtype,
        devices=parse_devices(devices),
        chip=None if chip is None else find_chip(chip),
        policy=windows,
        weight_bytes=None if weights is None else parse_bytes(weights),
    )
    if plot is not None:
        draw(found, plot)
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=2))
        return
    console = Console()
    for table in tables(found):
        console.print(table)
    for note in found.notes:
        console.print(f"- {note}", markup=False, highlight=False)
    if plot is not None:
        console.print(f"Plot: {plot}", markup=False, highlight=False)


def parse_devices(text: str) -> dict[str, int]:
    """Reads a mesh such as `tensor=8,data=2`.

    Raises:
      ValueError: If it is not of that form, or names an axis twice.

    >>> parse_devices("tensor=8,data=2")
    {'tensor': 8, 'data': 2}
    """
    axes: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, _, count = (part.strip() for part in item.partition("="))
        if not count.isdecimal() or axis in axes:
            raise ValueError(f"devices {text!r}: want axes with counts, such as tensor=8,data=2.")
        axes[axis] = int(count)
    return axes
