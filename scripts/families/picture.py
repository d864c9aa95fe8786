# SPDX-License-Identifier: Apache-2.0
"""Draws the cases of a family that belong to a series: ours and the rival's against the length."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

LABELS = {"ms": "time, ms", "KiB": "temporaries, KiB"}
# (series, length, unit, rival, ours, rival's)
Point = tuple[str, int, str, str, float, float]


def draw(points: Iterable[Point], path: Path) -> None:
    """Draws one panel for each unit, both axes logarithmic."""
    panels: dict[str, dict[tuple[str, str], list[tuple[int, float]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for series, length, unit, rival, ours, theirs in points:
        panels[unit][series, "jaxkv"].append((length, ours))
        panels[unit][series, rival].append((length, theirs))
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axis, (unit, lines) in zip(axes[0], panels.items(), strict=True):
        colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(s for s, _ in lines))}
        for (series, who), line in lines.items():
            style = dict(color=colours[series], linestyle="-" if who == "jaxkv" else "--")
            axis.plot(
                *zip(*sorted(line), strict=True), marker="o", label=f"{who}, {series}", **style
            )
        axis.set(xscale="log", yscale="log", xlabel="length, tokens", ylabel=LABELS[unit])
        ticks = sorted({length for line in lines.values() for length, _ in line})
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axis.minorticks_off()
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
