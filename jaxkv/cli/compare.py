# SPDX-License-Identifier: Apache-2.0
"""`jaxkv compare`: every variant trained, decoded from its cache, and counted."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxkv.cli.caches import HELP, parse_caches


def compare(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: under a minute.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and PNG files.")] = Path(
        "jaxkv-compare"
    ),
    variants: Annotated[
        str, typer.Option(help="Which ones, comma-separated; ratios are taken to the first.")
    ] = "mha,mqa,gqa,mla",
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    size: Annotated[
        str | None, typer.Option(help="tiny, small, medium or large; small if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each variant.")] = 1,
    text: Annotated[
        Path | None, typer.Option(help="Your own text file; Shakespeare if not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; float32 on CPU, else bfloat16.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help=HELP)] = None,
) -> None:
    """Train each attention variant on real text, decode from its cache, and show what it costs."""
    import jax

    from jaxkv.cli import compare_report as report
    from jaxkv.cli.comparison import compare_variant, read_text, write_sample
    from jaxkv.cli.numerics import compute_numerics
    from jaxkv.cli.saved import make_folder
    from jaxkv.cli.shown import Shown
    from jaxkv.cli.variants import SIZES, VARIANTS, pick

    names = [pick(v.strip().lower(), VARIANTS, "variant") for v in variants.split(",") if v.strip()]
    if not names or len(set(names)) != len(names) or seeds < 1:
        raise ValueError(
            f"--variants {variants!r} --seeds {seeds}: want each variant once, 1 seed."
        )
    if steps is not None and steps < 1:
        raise ValueError(f"--steps {steps}: want at least 1.")
    sized = SIZES[pick(size or ("tiny" if quick else "small"), SIZES, "size")]
    if steps is not None:
        sized = dataclasses.replace(sized, steps=steps)
    numerics = compute_numerics(dtype)
    choices = parse_caches(cache) if cache is not None else {}
    data = read_text(text, sized)
    make_folder(output)
    console, start, results, models = Console(), time.perf_counter(), [], []
    real = report.real_rows()
    with Shown([name.upper() for name in names] + ["text and pictures"]) as shown:
        for name in names:
            show = functools.partial(shown.show, name.upper())
            model, result = compare_variant(name, sized, data, seeds, numerics, show, choices)
            models.append(model)
            results.append(result)
        smallest = min(range(len(results)), key=lambda i: results[i].cache_bytes_per_token)
        shown.show("text and pictures", "a sample of text", 0.1)
        sample = write_sample(models[smallest])
        shown.show("text and pictures", "pictures", 0.7)
        pictures = report.draw(results, real, output)
        if choices:
            pictures.append(report.draw_caches(results, output))
        shown.show("text and pictures", "done", 1.0)
    console.print(report.table(results))
    console.print(report.ONE_SEED if seeds == 1 else f"± is the deviation over {seeds} seeds.")
    if choices:
        console.print(report.cache_table(results, sized))
    console.print(f"\nA sample of {names[smallest].upper()}'s text:", style="bold")
    console.print(sample, markup=False, highlight=False)
    console.print(report.real_table(real))
    facts = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": str(jax.numpy.dtype(numerics.dtype)),
        "size": dataclasses.asdict(sized),
        "seeds": seeds,
        "sample": {"variant": names[smallest], "text": sample},
        "seconds": time.perf_counter() - start,
    }
    (output / "compare.json").write_text(
        json.dumps(report.as_dict(results, facts), indent=2) + "\n"
    )
    (output / "real_models.json").write_text(json.dumps(real, indent=2) + "\n")
    written = ", ".join(p.name for p in [Path("compare.json"), Path("real_models.json"), *pictures])
    console.print(f"{facts['seconds']:.0f} s; written to {output}: {written}", highlight=False)
