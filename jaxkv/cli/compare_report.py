# SPDX-License-Identifier: Apache-2.0
"""A comparison as a table, as JSON and as pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxkv.cli.comparison import BATCHES, Result
from jaxkv.cli.variants import Size
from jaxkv.core.extras import require
from jaxkv.memory.counting import Storage
from jaxkv.memory.units import format_bytes
from jaxkv.models.presets import load_geometry

TITLE = "Same parameters, data order and tokens; only the attention differs"
KEY = (
    "params: all parameters. loss: validation, nats per byte. B/token: cache bytes, measured on "
    "live arrays. tok/s: decode steps from the cache, all rows together. gap: largest difference "
    "of cached and uncached logits."
)
CACHE_TITLE = "The same trained models decoded through other caches"
CACHE_KEY = (
    "First line of each: the default cache, contiguous in the compute dtype. B/token: bytes of "
    "live records over the {live:,} tokens given; a ring keeps its last tokens only, so its figure "
    "is its whole bytes spread over all of them and falls as the text grows. ratio: of B/token to "
    "the default. loss: nats per byte of the text's second half, each byte given all before it "
    "through the cache. Training rows were {length} tokens: reaching further may not help a "
    "model, and a ring may beat the default. gap: largest difference of logits to the default's."
)
PROMPT_KEY = (
    " {names}: given the first {prompt:,} tokens in one call, as a prompt that it compresses, and "
    "room for all others."
)
REAL_MODELS = ("gpt3-175b", "gpt2-xl", "llama2-70b", "llama3-8b", "deepseek-v3")
ONE_SEED = (
    "One seed cannot rank the losses: differences of this size also come from the seed alone. "
    "--seeds N trains each variant N times and adds the spread."
)
# Okabe and Ito's colours are told apart with any colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def table(results: Sequence[Result]) -> Table:
    """Lays the variants out side by side."""
    seeds = len(results[0].losses)
    out = Table(title=TITLE, caption=KEY, title_justify="left", caption_justify="left")
    out.add_column("", no_wrap=True, min_width=3)
    columns = ["params", "loss", "B/token", f"vs {results[0].variant.upper()}"]
    for column in [*columns, *(f"tok/s\nB={b}" for b in BATCHES), "gap"]:
        out.add_column(column, justify="right", no_wrap=True)
    for r in results:
        loss = f"{r.loss:.3f}" + (f"\n± {r.loss_deviation:.3f}" if seeds > 1 else "")
        out.add_row(
            r.variant.upper(),
            f"{r.parameters:,}",
            loss,
            f"{r.cache_bytes_per_token:,.0f}",
            f"{r.cache_bytes_per_token / results[0].cache_bytes_per_token:.3f}",
            *(f"{r.rates[b]:,.0f}" for b in BATCHES),
            f"{r.gap:.1e}",
        )
    return out


def cache_table(results: Sequence[Result], size: Size) -> Table:
    """Lays out each variant's caches under each other, the default one first."""
    key = CACHE_KEY.format(live=size.live, length=size.length)
    prompted = {found.cache: found.prompt for found in results[0].caches if found.prompt}
    if prompted:
        key += PROMPT_KEY.format(names=", ".join(prompted), prompt=max(prompted.values()))
    out = Table(title=CACHE_TITLE, caption=key, title_justify="left", caption_justify="left")
    out.add_column("", overflow="fold", min_width=3)
    columns = ["B/token", "ratio", "loss", *(f"tok/s\nB={b}" for b in BATCHES), "gap"]
    for column in columns:
        out.add_column(column, justify="right", no_wrap=True)
    for r in results:
        own, *_ = r.caches
        for number, found in enumerate(r.caches):
            out.add_row(
                f"  {found.cache}" if number else r.variant.upper(),
                f"{found.bytes_per_token:{',.0f' if found.bytes_per_token >= 100 else '.3g'}}",
                f"{found.bytes_per_token / own.bytes_per_token:.3f}",
                f"{found.loss:.4f}",
                *(f"{found.rates[b]:,.0f}" for b in BATCHES),
                f"{found.gap:.1e}" if number else "",
            )
        out.add_section()
    return out


def real_rows() -> list[dict[str, Any]]:
    """Counts real models' caches: bytes of a token in bfloat16, and of their multi-head form."""
    storage, rows = Storage("bfloat16"), []
    for name in REAL_MODELS:
        geometry = load_geometry(name)
        own, heads = storage.token_bytes(geometry), storage.token_bytes(geometry.per_head())
        rows.append({"model": name, "bytes_per_token": own, "multi_head_bytes_per_token": heads})
    return rows


def real_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Lays the real models' caches out."""
    out = Table(title="Real models, bfloat16, all layers", title_justify="left", title_style="bold")
    out.add_column("model")
    for column in ("cache bytes/token", "", "with a KV head per query head", "ratio"):
        out.add_column(column, justify="right")
    for row in rows:
        own, heads = row["bytes_per_token"], row["multi_head_bytes_per_token"]
        out.add_row(
            row["model"], f"{own:,}", format_bytes(own), format_bytes(heads), f"{own / heads:.4f}"
        )
    return out


def as_dict(results: Sequence[Result], facts: dict[str, Any]) -> dict[str, Any]:
    """Turns a comparison into plain data; sizes are in bytes, losses in nats per byte."""
    variants = []
    for r in results:
        deviation = None if math.isnan(r.loss_deviation) else r.loss_deviation
        row = dataclasses.asdict(r) | {"loss": r.loss, "loss_deviation": deviation}
        row["rates"] = {str(b): rate for b, rate in r.rates.items()}
        row["cache_ratio"] = r.cache_bytes_per_token / results[0].cache_bytes_per_token
        caches = [
            dataclasses.asdict(found)
            | {"rates": {str(b): rate for b, rate in found.rates.items()}}
            | {"ratio": found.bytes_per_token / r.caches[0].bytes_per_token}
            for found in r.caches
        ]
        del row["caches"]
        variants.append(row | ({"caches": caches} if caches else {}))
    return {**facts, "variants": variants}


def draw(results: Sequence[Result], real: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws loss curves, cache against speed, and the real models' caches."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for r, colour in zip(results, COLOURS, strict=False):
        axes.plot(*zip(*r.curve, strict=True), label=r.variant.upper(), color=colour, linewidth=1.2)
    axes.set(xlabel="training step", ylabel="training loss (nats per byte)", title="Loss")
    axes.legend()
    axes.grid(alpha=0.3)
    loss = _save(plt, figure, folder / "loss.png")

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5))
    names = [r.variant.upper() for r in results]
    left.bar(names, [r.cache_bytes_per_token for r in results], color=COLOURS[: len(results)])
    left.set(ylabel="cache bytes per token", title="Memory (measured)")
    for number, batch in enumerate(BATCHES):
        places = [i + (number - 0.5) * 0.4 for i in range(len(results))]
        rates = [r.rates[batch] for r in results]
        right.bar(places, rates, width=0.4, label=f"batch {batch}", color=COLOURS[number])
    right.set_xticks(range(len(results)), names)
    right.set(ylabel="decoded tokens per second", title="Speed (all rows together)")
    right.legend()
    cache = _save(plt, figure, folder / "cache.png")

    figure, axes = plt.subplots(figsize=(7, 4.5))
    models = [row["model"] for row in real]
    kib = [row["bytes_per_token"] / 1024 for row in real]
    bars = axes.barh(models, kib, color=COLOURS[0])
    axes.bar_label(bars, labels=[format_bytes(row["bytes_per_token"]) for row in real], padding=3)
    axes.set(xscale="log", xlabel="cache per token, bfloat16 (KiB, log scale)", title="Real models")
    axes.margins(x=0.2)
    return [loss, cache, _save(plt, figure, folder / "real_models.png")]


def draw_caches(results: Sequence[Result], folder: Path) -> Path:
    """Draws each cache's bytes, loss and speed, for every variant."""
    plt = _pyplot()
    names = [found.cache for found in results[0].caches]
    figure, (memory, loss, speed) = plt.subplots(1, 3, figsize=(15, 4.5))
    width = 0.8 / len(results)
    for number, (r, colour) in enumerate(zip(results, COLOURS, strict=False)):
        places = [i + (number - (len(results) - 1) / 2) * width for i in range(len(names))]
        sizes = [found.bytes_per_token for found in r.caches]
        rates = [found.rates[BATCHES[-1]] for found in r.caches]
        memory.bar(places, sizes, width=width, label=r.variant.upper(), color=colour)
        loss.plot(places, [found.loss for found in r.caches], "o", color=colour)
        speed.bar(places, rates, width=width, color=colour)
    memory.set(yscale="log", ylabel="cache bytes per token (log scale)", title="Memory (measured)")
    memory.legend()
    loss.set(ylabel="loss, second half of the text (nats per byte)", title="Loss")
    loss.grid(axis="y", alpha=0.3)
    speed.set(ylabel="decoded tokens per second", title=f"Speed, batch {BATCHES[-1]}")
    for axes in (memory, loss, speed):
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    return _save(plt, figure, folder / "caches.png")


def _pyplot() -> Any:
    require("matplotlib", extra="cli")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
