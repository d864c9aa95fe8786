# SPDX-License-Identifier: Apache-2.0
"""What the runs came to: a table, a picture and a JSON file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from allocation.lengths import Mix
from allocation.serving import Served
from rich.table import Table

# Okabe and Ito's colours are told apart with any colour vision; hatches tell them apart without.
PARTS = (
    ("tokens", "#0072B2", ""),
    ("for later", "#56B4E9", "//"),
    ("never filled", "#E69F00", "xx"),
    ("not given out", "#FFFFFF", ""),
)


COLUMNS = (
    "waste",
    "peak",
    "for later",
    "never filled",
    "pool used",
    "running",
    "times",
    "steps",
    "preempted",
    "held back",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One mix under one policy."""

    mix: Mix
    policy: str
    served: Served


def table(runs: list[Run]) -> Table:
    """Lists the runs of one mix; requests at a time are set against the first of them."""
    mix, first = runs[0].mix, runs[0].served
    out = Table(title=f"{mix.name}: {mix.source}; pool of {mix.pool:,} slots")
    out.add_column("allocation", no_wrap=True)
    for column in COLUMNS:
        out.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        s = run.served
        shares = (s.waste, s.peak_waste, s.reserved, s.internal, s.used)
        out.add_row(
            run.policy,
            *(f"{100 * x:.1f} %" for x in shares),
            f"{s.running:.1f}",
            f"{s.running / first.running:.2f}",
            f"{s.steps:,}",
            f"{s.preempted:,}",
            f"{s.held_back:,}",
        )
    return out


def as_json(runs: list[Run], facts: dict[str, Any]) -> str:
    """Writes the runs with everything that they were drawn from."""
    mixes = {run.mix.name: dataclasses.asdict(run.mix) for run in runs}
    rows = [
        {"mix": run.mix.name, "policy": run.policy, **dataclasses.asdict(run.served)}
        for run in runs
    ]
    return json.dumps({**facts, "mixes": mixes, "runs": rows}, indent=2) + "\n"


def draw(groups: list[list[Run]], path: Path) -> None:
    """Draws what the slots of the pool hold, a bar for each policy and a panel for each mix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(groups), figsize=(4.2 * len(groups) + 1, 4.2), sharey=True, squeeze=False
    )
    for axis, runs in zip(axes[0], groups, strict=True):
        names = [run.policy for run in runs]
        bottom = [0.0] * len(runs)
        for number, (label, colour, hatch) in enumerate(PARTS):
            heights = [100 * _parts(run.served)[number] for run in runs]
            look = {"color": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0.6}
            axis.bar(names, heights, bottom=bottom, label=label, **look)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axis.set_title(runs[0].mix.name)
        axis.tick_params(axis="x", rotation=60)
    axes[0, 0].set_ylabel("share of the pool, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _parts(s: Served) -> tuple[float, float, float, float]:
    """Splits the whole pool as `PARTS` names it."""
    return s.used, s.given_out * s.reserved, s.given_out * s.internal, 1 - s.given_out
