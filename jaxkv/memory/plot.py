# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: memory of one sequence against its length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxkv.core.extras import require
from jaxkv.memory.counting import Storage
from jaxkv.memory.planner import Plan
from jaxkv.memory.policy import row_slots
from jaxkv.memory.units import format_bytes
from jaxkv.models.geometry import ModelGeometry

# Okabe and Ito's colours are told apart with any colour vision; the dashes tell them apart without.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
OCTAVES = 11


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the picture: bytes of a sequence at each of the plot's lengths."""

    label: str
    colour: str
    dashes: str
    sequence_bytes: tuple[int, ...]


def lengths(plan: Plan) -> tuple[int, ...]:
    """Chooses lengths in equal ratios, and those where a layer is full, so that bends are sharp."""
    end = max(plan.context, plan.geometry.max_context)
    steps = {round(end * 2 ** (-octave / 4)) for octave in range(4 * OCTAVES + 1)}
    layouts = plan.storage.policy.of_row().layouts(plan.geometry.layers)
    full = {row_slots(layout, end) for layout in layouts}
    windows = {layer.window for layer in plan.geometry.layers if layer.window is not None}
    bends = {length for length in full | windows if length < end}
    return tuple(sorted(length for length in steps | bends if length > 0))


def lines(plan: Plan) -> tuple[Line, ...]:
    """Counts the lines: the plan, with every token kept, and with a KV head per query head."""
    at, model, storage = lengths(plan), plan.geometry, plan.storage
    policy = storage.policy.keeping_all()
    keep_all = dataclasses.replace(storage, policy=policy)
    out = [_line(f"{model.name}, {storage.dtype}", BLUE, "-", at, storage, model)]
    if storage.policy.layouts(model.layers) != policy.layouts(model.layers):
        out.append(_line("with every token kept in every layer", GREEN, "-.", at, keep_all, model))
    if plan.per_head_bytes_per_token != plan.bytes_per_token:
        label = "the same, with a KV head per query head"
        out.append(_line(label, ORANGE, "--", at, keep_all, model.per_head()))
    return tuple(out)


def _line(
    label: str,
    colour: str,
    dashes: str,
    at: tuple[int, ...],
    storage: Storage,
    model: ModelGeometry,
) -> Line:
    return Line(label, colour, dashes, tuple(storage.row_bytes(model, n) for n in at))


def draw(plan: Plan, file: Path) -> None:
    """Writes the picture, in the format that the file's name ends with.

    Raises:
      ImportError: If matplotlib is not installed; the message says how to install it.
      ValueError: If the folder does not exist or the format is unknown.
    """
    if not file.resolve().parent.is_dir():
        raise ValueError(f"no folder {str(file.resolve().parent)!r} to write the plot into.")
    figure = require("matplotlib.figure", extra="cli").Figure(
        figsize=(7, 4.5), layout="constrained"
    )
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in formats:
        raise ValueError(f"plot file {file.name!r}: want a name that ends in {', '.join(formats)}.")
    axes, at = figure.subplots(), lengths(plan)
    for line in reversed(lines(plan)):
        label = f"{line.label}: {format_bytes(line.sequence_bytes[-1])}"
        axes.plot(at, line.sequence_bytes, line.dashes, color=line.colour, label=label)
    # On equal ratios every linear growth has the same slope, and a window shows as a bend.
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, position: format_bytes(value, places=0))
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("memory of its KV cache")
    axes.set_title(f"One sequence, up to {at[-1]:,} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
